"""Compiles a kernel's C text into a shared library, once per text, machine and compiler.

The library lies in a cache folder under a name made of everything that went into it, so another
version, another CPU or another compiler never finds a stale one. Where there is no compiler, as in
an image of an environment, one that any compiler made of the same text for this CPU is taken.
Called once, at load.
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
FOLD = Path(__file__).with_name("fold.c")
# No -ffast-math: linking with it changes the float mode of the whole process
FLAGS = ("-O3", "-fopenmp", "-fPIC", "-shared", "-std=gnu11", "-w")
# Names the CPU to compile for, as compilers know it: one that all machines have on which a saved
# engine is to go on. Unset: this machine's own.
LEVEL_VARIABLE = "NAGARA_CPU_LEVEL"


def cache_folders() -> list[Path]:
    """Where kernels may lie and be put, best first.

    NAGARA_ENGINE_CACHE alone if it is set. Else beside the text, as Python keeps its compiled
    files: there every process finds what one has compiled, also in a container that shows the
    installation read-only. Else the user's cache, else a folder for temporary files.
    """
    named = os.environ.get("NAGARA_ENGINE_CACHE")
    if named:
        return [Path(named)]
    base = os.environ.get("XDG_CACHE_HOME")
    own = (Path(base) if base else Path.home() / ".cache") / "nagara" / "kernels"
    temporary = Path(tempfile.gettempdir()) / f"nagara-kernels-{os.getuid()}"
    return [SOURCE.parent / "__pycache__", own, temporary]


def load_kernel(*, is_bfloat16: bool) -> ctypes.CDLL:
    """The compiled kernel for one number type.

    Raises:
        UnsupportedError: there is no C compiler with OpenMP, or no folder to keep the kernel in.
    """
    try:
        return ctypes.CDLL(str(find_or_compile(is_bfloat16=is_bfloat16)))
    except OSError as error:
        raise UnsupportedError(f"the kernel cannot be loaded: {error}", where="kernel") from error


def load_fold() -> ctypes.CDLL:
    """The compiled copying that takes a value hash on the way. Raises UnsupportedError."""
    try:
        return ctypes.CDLL(str(_find_or_compile(cache_folders(), FOLD)))
    except OSError as error:
        raise UnsupportedError(f"the kernel cannot be loaded: {error}", where="kernel") from error


def compile_all() -> Path:
    """Compile the kernels, of both number types, ahead of need; the folder they are in.

    In the installation itself if this user may write there: then every user finds them, also in
    containers that show the installation read-only. Else where this user's engines look.
    Raises UnsupportedError.
    """
    try:
        return _compile_both([SOURCE.parent / "__pycache__"])
    except UnsupportedError:
        return _compile_both(cache_folders())


def _compile_both(folders: list[Path]) -> Path:
    files = [_find_or_compile(folders, SOURCE, _type(is_bfloat16)) for is_bfloat16 in (True, False)]
    _find_or_compile(folders, FOLD)
    return files[0].parent


def find_or_compile(*, is_bfloat16: bool) -> Path:
    """The kernel's file, compiled if no folder has it. Raises UnsupportedError."""
    return _find_or_compile(cache_folders(), SOURCE, _type(is_bfloat16))


def _type(is_bfloat16: bool) -> str:
    return f"-DBF16={int(is_bfloat16)}"


def _find_or_compile(candidates: list[Path], source: Path, *defines: str) -> Path:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    level = os.environ.get(LEVEL_VARIABLE) or "native"
    flags = (*FLAGS, f"-march={level}", *defines)
    text, stem = _text_mark(source, flags), source.stem
    folders = [folder for folder in candidates if _is_trusted(folder)]
    if compiler is None:
        made = [file for folder in folders for file in sorted(folder.glob(f"{stem}-{text}-*.so"))]
        if not made:
            raise UnsupportedError("there is no C compiler", where="kernel", hint="install gcc")
        return made[0]
    name = f"{stem}-{text}-{_compiler_mark(compiler)}.so"
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    reasons = []
    for folder in folders:
        try:
            _compile(compiler, source, flags, folder / name)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        return folder / name
    raise UnsupportedError(
        "no folder can keep the kernel: " + "; ".join(reasons),
        where="kernel",
        hint="set NAGARA_ENGINE_CACHE to a folder of yours",
    )


def _is_trusted(folder: Path) -> bool:
    """Code is loaded only from folders that nobody but root and this user can write to."""
    try:
        found = folder.stat()
    except OSError:
        return True  # made by us when needed
    return found.st_uid in (0, os.getuid()) and not found.st_mode & 0o002


def _text_mark(source: Path, flags: tuple[str, ...]) -> str:
    """Text, flags and CPU."""
    digest = hashlib.blake2b(source.read_bytes(), digest_size=10)
    for part in (" ".join(flags).encode(), _cpu_flags()):
        digest.update(b"\0" + part)
    return digest.hexdigest()


def _compiler_mark(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.blake2b(version, digest_size=5).hexdigest()


def _cpu_flags() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return b""
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")


def _compile(compiler: str, source: Path, flags: tuple[str, ...], file: Path) -> None:
    """Compile beside the target and rename: who looks for it finds all of it or nothing."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{source.stem}-", suffix=".so")
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", name, "-lm"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise UnsupportedError(f"{compiler} refuses the kernel: {reason[0]}", where=str(source))
        Path(name).replace(file)
    finally:
        Path(name).unlink(missing_ok=True)
