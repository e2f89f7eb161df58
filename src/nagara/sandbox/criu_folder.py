"""A CRIU of nagara's own: the newest Debian's packages, unpacked into a folder, never installed.

Debian's stable releases carry a CRIU older than their users' kernels. Its newest one runs on any
of them when started through the C library it was built against, so the packages of CRIU and of
all its libraries are unpacked beside each other and a small `criu` script starts them. Packages
come from the mirror this machine already uses and are verified by apt with the distribution's own
keys, in folders of their own: the machine's sources, lists and packages stay as they are.

    TOOLS/criu -> .criu-XXXX     the link is replaced at once, so a criu is there or is not
    TOOLS/.criu-XXXX/criu        the script
    TOOLS/.criu-XXXX/usr/...     the unpacked packages

Called from `nagara setup`; blocks for seconds. Nothing is flushed to the disk on purpose: a tree
torn by a power cut fails its version check and is made again.
"""

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from nagara.base.folder_lock import folder_lock
from nagara.sandbox.tools import (
    CRIU_MINIMUM,
    ToolError,
    last_line,
    own_criu,
    read_version,
    run_quietly,
)

_KEYRINGS = (
    Path("/usr/share/keyrings/debian-archive-keyring.gpg"),
    Path("/usr/share/keyrings/debian-archive-keyring.pgp"),
)
_FROM_HINT = (
    "give a folder with the .deb files of a CRIU >= 4.2 and its libraries, or with their "
    "unpacked tree: nagara setup criu --from DIR"
)
_log = logging.getLogger(__name__)


def install_criu_with_apt(tools_dir: Path) -> Path:
    """Fetches and unpacks the newest CRIU; returns the script that runs it.

    Raises:
        ToolError: not a Debian machine, no network, or the CRIU obtained does not run.
    """
    with tempfile.TemporaryDirectory(prefix="nagara-criu-") as scratch:
        return install_criu_from(tools_dir, _download(Path(scratch), _debian_mirror()))


def install_criu_from(tools_dir: Path, source: Path) -> Path:
    """Takes CRIU out of a folder of .deb files or an unpacked tree; returns its script.

    Raises:
        ToolError: the folder holds neither, or the CRIU in it does not run.
    """
    with folder_lock(tools_dir):
        tree = Path(tempfile.mkdtemp(dir=tools_dir, prefix=".criu-"))
        try:
            tree.chmod(0o755)
            _fill(tree, source)
            _write_script(tree)
            _require_version(tree / "criu")
        except BaseException:
            shutil.rmtree(tree)
            raise
        _publish(tools_dir, tree)
    return own_criu(tools_dir)


def _debian_mirror() -> str:
    """The address of the Debian archive in this machine's apt configuration."""
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise ToolError("this is not a Debian system: no apt-get and dpkg-deb", hint=_FROM_HINT)
    mirror = _configured_mirror()
    if mirror is None and os.geteuid() == 0:
        # Without package lists (as in a fresh container) apt does not know whose archive it is.
        _log.info("reading the machine's package lists (apt-get update)")
        run_quietly(["apt-get", "update", "-q"])
        mirror = _configured_mirror()
    if mirror is None:
        raise ToolError(
            "no Debian archive among this machine's apt sources, or its lists were never read",
            hint="run `apt-get update` as root and try again; or " + _FROM_HINT,
        )
    return mirror


def _configured_mirror() -> str | None:
    shown = run_quietly(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(COMPONENT)|$(REPO_URI)"]
    )
    for line in shown.stdout.splitlines():
        origin, label, component, address = line.split("|", 3)
        if (origin, label, component) == ("Debian", "Debian", "main") and address:
            return address
    return None


def _download(scratch: Path, mirror: str) -> Path:
    """Lets apt fetch and verify CRIU with everything it needs; returns the folder of packages."""
    keyring = next((path for path in _KEYRINGS if path.exists()), None)
    if keyring is None:
        raise ToolError(
            "Debian's archive keys are not installed",
            where=str(_KEYRINGS[0]),
            hint="install the package `debian-archive-keyring`; or " + _FROM_HINT,
        )
    for folder in ("state/lists/partial", "cache/archives/partial", "log"):
        (scratch / folder).mkdir(parents=True)
    (scratch / "state/status").touch()  # nothing counts as installed, so every library is fetched
    (scratch / "sources.list").write_text(
        f"deb [signed-by={keyring} target=Packages lang=none] {mirror} unstable main\n"
    )
    scratch.chmod(0o755)  # apt fetches as a user of its own
    apt = ["apt-get", "-q", "-y"]
    for setting in (
        f"Dir::State={scratch}/state",
        f"Dir::State::status={scratch}/state/status",
        f"Dir::Cache={scratch}/cache",
        f"Dir::Log={scratch}/log",
        f"Dir::Etc::sourcelist={scratch}/sources.list",
        "Dir::Etc::sourceparts=/dev/null",
        "Dir::Etc::preferences=/dev/null",
        "Dir::Etc::preferencesparts=/dev/null",
        "APT::Default-Release=unstable",
        "APT::Get::List-Cleanup=0",
    ):
        apt += ["-o", setting]
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    _log.info("fetching CRIU and its libraries from this machine's Debian mirror")
    install = ["install", "--download-only", "--no-install-recommends", "criu"]
    for step in (["update"], install):
        done = run_quietly([*apt, *step], environment)
        # apt-get update ends with 0 even when the archive was not there; the next step then fails.
        if done.returncode != 0:
            raise ToolError(
                f"apt could not fetch CRIU: {last_line(done)}", where=mirror, hint=_FROM_HINT
            )
    return scratch / "cache/archives"


def _fill(tree: Path, source: Path) -> None:
    packages = sorted(source.glob("*.deb"))
    if packages:
        for package in packages:
            unpacked = run_quietly(["dpkg-deb", "--extract", str(package), str(tree)])
            if unpacked.returncode != 0:
                raise ToolError(
                    f"the package cannot be unpacked: {last_line(unpacked)}", where=str(package)
                )
    elif (source / "usr").is_dir():
        shutil.copytree(source / "usr", tree / "usr", symlinks=True)
    else:
        raise ToolError(
            "the folder holds neither .deb files nor an unpacked `usr` tree",
            where=str(source),
            hint=_FROM_HINT,
        )


def _write_script(tree: Path) -> None:
    """`tree/criu`, with absolute paths: it is started hundreds of times, so it forks nothing."""
    program = tree / "usr/sbin/criu"
    # The loader's folder is also the libraries' (usr/lib/TRIPLET), on every architecture.
    loader = next(tree.glob("usr/lib/*-linux-gnu*/ld-linux*.so.*"), None)
    for part, name in ((program, "usr/sbin/criu"), (loader, "the C library's loader (libc6)")):
        if part is None or not part.exists():
            raise ToolError(f"{name} is not among the packages", hint=_FROM_HINT)
    assert loader is not None
    command = shlex.join([str(loader), "--library-path", str(loader.parent), str(program)])
    script = tree / "criu"
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)


def _require_version(script: Path) -> None:
    version = read_version(script)
    minimum = ".".join(map(str, CRIU_MINIMUM))
    if version is None:
        said = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
        raise ToolError(f"the CRIU obtained does not run: {last_line(said)}", hint=_FROM_HINT)
    if tuple(int(part) for part in version.split(".")[:2]) < CRIU_MINIMUM:
        raise ToolError(f"CRIU {version} is too old, {minimum} is needed", hint=_FROM_HINT)


def _publish(tools_dir: Path, tree: Path) -> None:
    """Points the link at `tree`, then removes what it pointed at before and torn attempts."""
    link = tree / "link"
    link.symlink_to(tree.name)
    link.replace(tools_dir / "criu")
    remove_unused_trees(tools_dir)


def unused_trees(tools_dir: Path) -> list[Path]:
    """Trees that the link does not point to: being made by whoever holds the lock, or torn."""
    used = (tools_dir / "criu").resolve()
    return sorted(tree for tree in tools_dir.glob(".criu-*") if tree.resolve() != used)


def remove_unused_trees(tools_dir: Path) -> None:
    """Removes them. The caller holds the folder's lock."""
    for tree in unused_trees(tools_dir):
        shutil.rmtree(tree)
