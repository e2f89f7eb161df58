"""Snapshots for lesser CPUs than the one they are made on. Pure.

Libraries choose code by the CPU's features once, at start, and their choice is in the saved memory.
Most can be told by the environment to choose as if the CPU were a lesser one: x86-64-v3 of the
psABI, which nearly all of today's servers have (AVX2, no AVX-512). A replica that is started that
way and then saved needs no more than that of the hosts it is put back on.

What no variable reaches (programs that ask the CPU themselves) is not lowered. Whether a process
has used AVX-512 nevertheless is seen by the kernel: see `vector_use`.
"""

from collections.abc import Mapping

from nagara.snapshot.variant import HostFacts, Variant

LEVEL = "x86-64-v3"
LEVEL_VARIABLE = "NAGARA_CPU_LEVEL"  # for the engine, and for apps that look themselves

_V1 = ("fpu", "cx8", "cmov", "mmx", "fxsr", "sse", "sse2", "syscall", "lm")
_V2 = ("cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3")
_V3 = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave")
LEVEL_FLAGS = frozenset(_V1 + _V2 + _V3)
# Beyond the level, but on nearly all CPUs that have it, and used without asking the environment.
_KEPT = frozenset(["aes", "pclmulqdq", "rdrand", "rdtscp", "fsgsbase", "clflush", "tsc"])

# Bits of CPUID leaf 7: EBX (rdseed, adx, sha and AVX-512) and ECX above it.
_OPENSSL_EBX = (16, 17, 18, 19, 21, 28, 29, 30, 31)
_OPENSSL_ECX = (1, 6, 8, 9, 10, 11, 12, 14)
_OPENSSL_MASK = sum(1 << bit for bit in _OPENSSL_EBX) | sum(1 << 32 + bit for bit in _OPENSSL_ECX)

_GLIBC = "glibc.cpu.hwcaps"
_GLIBC_OFF = "-AVX512F,-AVX512VL,-AVX512BW,-AVX512CD,-AVX512DQ,-XSAVEC"
_VARIABLES = {
    LEVEL_VARIABLE: LEVEL,
    "ATEN_CPU_CAPABILITY": "avx2",  # torch
    "TORCHINDUCTOR_CPP_MARCH": LEVEL,
    "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "BLIS_ARCH_TYPE": "haswell",
    # numpy's names, of its newer and its older releases; those it does not know it passes over.
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL "
    "AVX512_ICL AVX512_SPR",
    "OPENSSL_ia32cap": f":~{_OPENSSL_MASK:#x}",
}


def can_level(facts: HostFacts) -> bool:
    """Whether this CPU has all of the level: only then may libraries be told to use it."""
    return facts.cpu_flags >= LEVEL_FLAGS


def levelled_environment(own: Mapping[str, str]) -> dict[str, str]:
    """What to add to a replica's environment; the app's own variables stay as they are."""
    added = {name: value for name, value in _VARIABLES.items() if name not in own}
    tunables = own.get("GLIBC_TUNABLES", "")
    if f"{_GLIBC}=" not in tunables:
        added["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, f"{_GLIBC}={_GLIBC_OFF}")))
    return added


def levelled_variant(facts: HostFacts) -> Variant:
    """What a replica made that way on this host needs."""
    return Variant(
        facts.cpu_flags & (LEVEL_FLAGS | _KEPT),
        facts.signal_frame_bytes,
        facts.cache_line_bytes,
        is_levelled=True,
    )
