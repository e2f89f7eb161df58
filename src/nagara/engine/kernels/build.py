"""Compiles a kernel's C text into a shared library, once per text, machine and compiler.

The library lies in a cache folder under a name made of everything that went into it, so another
version, another CPU or another compiler never finds a stale one. Called once, at load.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from nagara.engine.errors import UnsupportedError

SOURCE = Path(__file__).with_name("flat.c")
# No -ffast-math: linking with it changes the float mode of the whole process
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-w")


def cache_folder() -> Path:
    """Where compiled kernels are kept; NAGARA_ENGINE_CACHE or the user's cache folder."""
    named = os.environ.get("NAGARA_ENGINE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nagara" / "kernels"


def load_kernel(*, is_bfloat16: bool) -> ctypes.CDLL:
    """The compiled kernel for one number type.

    Raises:
        UnsupportedError: there is no C compiler with OpenMP, or it refuses the text.
    """
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise UnsupportedError("there is no C compiler", where="kernel", hint="install gcc")
    flags = (*FLAGS, f"-DBF16={int(is_bfloat16)}")
    file = cache_folder() / f"flat-{_name(compiler, flags)}.so"
    try:
        if not file.exists():
            _compile(compiler, flags, file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise UnsupportedError(f"the kernel cannot be used: {error}", where=str(file)) from error


def _name(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(SOURCE.read_bytes(), digest_size=10)
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    for part in (" ".join(flags).encode(), version, _cpu_flags()):
        digest.update(b"\0" + part)
    return digest.hexdigest()


def _cpu_flags() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(compiler: str, flags: tuple[str, ...], file: Path) -> None:
    """Compile beside the target and rename: who looks for it finds all of it or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".flat-", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, str(SOURCE), "-o", name, "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UnsupportedError(f"{compiler} refuses the kernel: {reason[0]}", where=str(SOURCE))
        Path(name).replace(file)
    finally:
        Path(name).unlink(missing_ok=True)
