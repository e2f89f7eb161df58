"""Which container tools this machine has, and whether they are new enough.

It knows where runc and CRIU may lie and how to ask them for their version; how CRIU is fetched is
`criu_folder`'s business, and what is done with the tools that of their callers. Called from the
command line and once when a node agent starts; every function blocks for some ten milliseconds.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from nagara.base.durable import write_durably
from nagara.base.errors import NagaraError

CRIU_MINIMUM = (4, 2)  # 3.17 does not start on Linux >= 6.13, 4.1 cannot dump sockets on >= 6.16
CRIU_UNTESTED = (5, 0)  # from here on nobody has tried it with nagara: used, with a warning
RUNC_MINIMUM = (1, 1)  # the first with the annotation that passes a configuration file to CRIU

_RUN_TIMEOUT_S = 60.0
_INSTALL_TIMEOUT_S = 600.0
_REFUSED = "criu.refused"
_SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")  # often not on an ordinary user's PATH


class ToolError(NagaraError):
    """A tool could not be obtained, or the one obtained does not work."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools to use; a path is None when there is none that is new enough.

    The versions are those of the usable tool, or else of the best one found, or None.
    """

    runc: Path | None
    criu: Path | None
    runc_version: str | None
    criu_version: str | None
    missing: tuple[str, ...]  # what is lacking and what to do about it, in words
    doubts: tuple[str, ...] = ()  # what is usable but was not tried with nagara, in words


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    version: str

    def is_at_least(self, minimum: tuple[int, int]) -> bool:
        major, minor = self.version.split(".")[:2]
        return (int(major), int(minor)) >= minimum


def find_tools(tools_dir: Path) -> Tools:
    """Looks on PATH first, then below `tools_dir`; asks each tool for its version."""
    runc, runc_gap = _choose("runc", on_path("runc"), RUNC_MINIMUM)
    criu, criu_gap = _choose("criu", criu_candidates(tools_dir), CRIU_MINIMUM)
    is_untested = criu is not None and criu_gap is None and criu.is_at_least(CRIU_UNTESTED)
    return Tools(
        runc=None if runc_gap or runc is None else runc.path,
        criu=None if criu_gap or criu is None else criu.path,
        runc_version=runc.version if runc else None,
        criu_version=criu.version if criu else None,
        missing=tuple(gap for gap in (runc_gap, criu_gap) if gap),
        doubts=(f"criu {criu.version} is newer than those tried with nagara (4.2 to 4.x)",)
        if criu is not None and is_untested
        else (),
    )


def criu_candidates(tools_dir: Path) -> list[Path]:
    """The system's CRIU, unless it was refused as it is now, then nagara's own."""
    system = [path for path in on_path("criu") if _mark(path) not in _refused(tools_dir)]
    return [*system, own_criu(tools_dir)]


def refuse_criu(tools_dir: Path, criu: Path) -> None:
    """Has this CRIU passed over until it changes: its version is good, but it does not work."""
    tools_dir.mkdir(parents=True, exist_ok=True)
    write_durably(tools_dir / _REFUSED, f"{_mark(criu)}\n".encode(), mode=0o644)


def accept_criu(tools_dir: Path) -> None:
    """Takes `refuse_criu` back."""
    (tools_dir / _REFUSED).unlink(missing_ok=True)


def _refused(tools_dir: Path) -> list[str]:
    try:
        return (tools_dir / _REFUSED).read_text().splitlines()
    except OSError:
        return []


def _mark(program: Path) -> str:
    """Names a program as it is now: another version has another size or time."""
    try:
        state = program.stat()
    except OSError:
        return str(program)
    return f"{program} {state.st_size} {state.st_mtime_ns}"


def own_criu(tools_dir: Path) -> Path:
    """Where `nagara setup criu` puts the CRIU to run. Its folder may stand first on a PATH."""
    return tools_dir / "criu" / "criu"


def on_path(name: str) -> list[Path]:
    """The program of that name on PATH or in a system folder: none or one."""
    search = os.pathsep.join((os.environ.get("PATH", ""), *_SYSTEM_FOLDERS))
    found = shutil.which(name, path=search)
    return [Path(found)] if found else []


def read_version(program: Path) -> str | None:
    """`4.2.1` from `PROGRAM --version`; None when it does not run or says something else."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=_RUN_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bversion:?\s+v?(\d+\.\d+(?:\.\d+)*)", done.stdout, re.IGNORECASE)
    return match[1] if match and done.returncode == 0 else None


def check_criu(criu: Path) -> None:
    """Runs CRIU's own check of this kernel. Needs root.

    Raises:
        ToolError: with what CRIU said.
    """
    done = subprocess.run([criu, "check"], capture_output=True, text=True, timeout=_RUN_TIMEOUT_S)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ToolError(
            "CRIU does not work on this kernel: " + (said[-1] if said else "no reason given"),
            where=str(criu),
            hint=f"run `{criu} check --all` for the whole list; nagara runs without snapshots",
        )


def install_package(package: str, command: str) -> None:
    """Installs a package of the distribution with apt; `command` is what to say to sudo.

    Raises:
        ToolError: not root, no apt, or apt failed.
    """
    hint = f"install the package `{package}` with this system's package tool"
    if shutil.which("apt-get") is None:
        raise ToolError(f"this system has no apt-get to install {package} with", hint=hint)
    if os.geteuid() != 0:
        raise ToolError(f"installing {package} needs root", hint=f"run `sudo {command}`")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    install = ["apt-get", "install", "-q", "-y", "--no-install-recommends"]
    install += ["-o", "DPkg::Lock::Timeout=300", package]  # somebody else's apt may be at work
    # A machine that never ran `apt-get update`, or long ago, names packages it cannot get.
    for step in (install, ["apt-get", "update", "-q"], install):
        done = run_quietly(step, environment)
        if done.returncode == 0 and step is install:
            return
    raise ToolError(f"apt-get could not install {package}: {last_line(done)}", hint=hint)


def run_quietly(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs an installation step without a terminal; the caller judges the outcome.

    Raises:
        ToolError: it took longer than ten minutes.
    """
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"`{' '.join(command[:2])}` did not end in ten minutes") from error


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last thing a failed step said; apt marks its errors with `E:`."""
    lines = (done.stdout + done.stderr).strip().splitlines()
    errors = [line for line in lines if line.startswith(("E:", "dpkg-deb: error"))]
    return (errors or lines or [f"exit code {done.returncode}"])[-1]


def _choose(
    name: str, candidates: list[Path], minimum: tuple[int, int]
) -> tuple[_Found | None, str | None]:
    """The first candidate that is new enough; else the newest, and what is missing in words."""
    found = [
        _Found(path, version)
        for path in candidates
        if path.exists() and (version := read_version(path))
    ]
    for tool in found:
        if tool.is_at_least(minimum):
            return tool, None
    wanted = f"{name} >= {minimum[0]}.{minimum[1]}"
    has = f"{found[0].path} is {found[0].version}" if found else "none found"
    return (found[0] if found else None), f"{wanted} ({has}); `nagara setup {name}` gets it"
