"""Loads what chooses code by the CPU, has it compute, and tells by `chosen()` what it chose."""

import ctypes
import ssl  # noqa: F401 - loads libcrypto
import sys
from pathlib import Path

import numpy
import torch

numpy.random.rand(100_000).sum()
some = torch.rand(256, 256)
(some @ some).exp().sum()
torch.nn.functional.linear(some.to(torch.bfloat16), some.to(torch.bfloat16))


def mapped(name):
    lines = Path("/proc/self/maps").read_text().splitlines()
    line = next(line for line in lines if name in line)
    return int(line.split("-")[0], 16), line.split()[-1]


def chosen():
    strlen = ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value
    crypto = ctypes.CDLL(mapped("/libcrypto.so")[1])
    crypto.OPENSSL_info.restype = ctypes.c_char_p
    features = sys.modules["numpy._core._multiarray_umath"].__cpu_features__
    wide = ("X86_V4", "AVX512_ICL")
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "strlen": strlen - mapped("/libc.so.6")[0],
        "openssl": crypto.OPENSSL_info(1008).decode().split()[0],
        "numpy": [name for name, has in features.items() if has and name in wide],
    }
