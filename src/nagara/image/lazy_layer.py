"""Mounting the lazy data layer, keeping its descriptor, and having a daemon behind it.

The mounter opens `/dev/fuse`, mounts, gives the descriptor to a keeper that outlives everybody,
and starts a daemon, which takes it from there. While the daemon is away, readers wait; a new one
goes on with the same mount. Needs root.

It does not know what the keeper is: `DescriptorKeeper` and the daemon's command line are given.
"""

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nagara.base.errors import NagaraError
from nagara.base.linux import MNT_DETACH, MS_NODEV, MS_NOSUID, MS_RDONLY, mount, unmount
from nagara.image.fuse_wire import MAX_READ_BYTES
from nagara.image.mounts import MountError, mount_points, unquoted

_log = logging.getLogger(__name__)
READ_AHEAD_KIB = 32768
_START_S = 20.0
_ASK_S = 10.0
_RESTART_PAUSE_S = 0.2
# Held beside the descriptor once a daemon has begun to serve it: the next one takes over.
SERVED_MARK = ":served"


class DescriptorKeeper(Protocol):
    """Somebody who outlives the daemon and holds descriptors for it. Blocking calls."""

    def hold(self, name: str, descriptor: int) -> None:
        """Keeps a duplicate under a name, in place of an earlier one."""
        ...

    def held(self, name: str) -> int | None:
        """A duplicate of what is kept; the caller closes it."""
        ...

    def release(self, name: str) -> None:
        """Closes what is kept under that name."""
        ...


class DaemonError(NagaraError):
    """The daemon does not answer, or refuses."""


Launch = Callable[[Sequence[str], Path], None]  # command line, log file


def launch_detached(argv: Sequence[str], log: Path) -> None:
    """Starts a process that outlives this one; while both live, a thread waits for its end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            cwd="/", start_new_session=True,
        )  # fmt: skip
    threading.Thread(target=process.wait, name="files-daemon-end", daemon=True).start()


def ask_daemon(path: Path, request: dict[str, Any], *, time_limit_s: float = _ASK_S) -> Any:
    """One question to a daemon's control socket. Raises `DaemonError`."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(time_limit_s)
            with socket_address(path) as address:
                client.connect(address)
            client.sendall(json.dumps(request).encode() + b"\n")
            with client.makefile("rb") as stream:
                line = stream.readline()
    except OSError as error:
        raise DaemonError(f"does not answer: {error}", where=str(path)) from error
    if not line:
        raise DaemonError("ended while it was asked", where=str(path))
    answer = json.loads(line)
    if "error" in answer:
        raise DaemonError(answer["error"], where=str(path))
    return answer


@contextlib.contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """A name for the socket at `path` that fits the 108 bytes of sockaddr_un."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class LazyLayer:
    """One tenant's lazy data layer on this machine; or, as a fallback, a whole image by FUSE.

    Args:
        folder: for the mount point, the control socket and the log.
        tenant: whose objects it shows.
        keeper: holds the descriptor.
        command: the daemon's command line; the name under which the descriptor is held and the
            control socket's path are appended, and `tree` if it is given.
        tree: the index of an image that is shown as a whole instead of the tenant's objects.
    """

    def __init__(
        self,
        folder: Path,
        tenant: str,
        keeper: DescriptorKeeper,
        command: Sequence[str],
        *,
        launch: Launch = launch_detached,
        tree: str | None = None,
    ) -> None:
        self.path = folder / "lazy" / tenant if tree is None else folder / "tree" / tenant / tree
        stem = tenant if tree is None else f"{tenant}-{tree[:20]}"
        self.socket = folder / f"{stem}.sock"
        self._log_file = folder / f"{stem}.log"
        self._name = f"fuse:{self.path}"
        self._keeper = keeper
        self._command = (*command, self._name, str(self.socket), *([tree] if tree else []))
        self._launch = launch
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def ensure(self) -> None:
        """Mounted and served afterwards. Raises `MountError`, `DaemonError`."""
        with self._lock:
            if not self._is_mounted() or self._held() is None:
                self._mount()
            if not self._answers():
                self._start()

    def ask(self, request: dict[str, Any], *, time_limit_s: float = _ASK_S) -> Any:
        """Raises `DaemonError`."""
        return ask_daemon(self.socket, request, time_limit_s=time_limit_s)

    def supervise(self) -> None:
        """From now on a dead daemon is replaced at once, by a thread of this process."""
        if self._watcher is not None:
            return
        self._watcher = threading.Thread(target=self._watch, name="files-daemon", daemon=True)
        self._watcher.start()

    def leave(self) -> None:
        """Ends the supervision; mount and daemon stay."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()

    def unmount(self) -> None:
        """Takes the layer down. Who still reads through it gets ENOTCONN afterwards."""
        self.leave()
        with contextlib.suppress(DaemonError):
            self.ask({"op": "stop"})
        self._take_down()

    def _mount(self) -> None:
        """A new mount; what is left of an earlier one, which nobody can serve, goes first."""
        self._take_down()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MountError(f"/dev/fuse: {error.strerror}", hint="modprobe fuse") from error
        try:
            options = (
                f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other,"
                f"default_permissions,max_read={MAX_READ_BYTES}"
            )
            try:
                mount("nagara", self.path, "fuse", MS_RDONLY | MS_NODEV | MS_NOSUID, options)
            except OSError as error:
                raise MountError(
                    f"fuse mount refused: {error.strerror}", where=str(self.path)
                ) from error
            self._keeper.hold(self._name, descriptor)
        finally:
            os.close(descriptor)

    def _take_down(self) -> None:
        if self._is_mounted():
            abort_connection(self.path)
            unmount(self.path, MNT_DETACH)
        self._keeper.release(self._name)
        self._keeper.release(self._name + SERVED_MARK)

    def _start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._launch(self._command, self._log_file)
        deadline_s = time.monotonic() + _START_S
        while not self._answers():
            if self._held() is None:  # this kernel cannot hand over: the old mount is lost
                self._mount()
                self._launch(self._command, self._log_file)
            if time.monotonic() > deadline_s:
                raise DaemonError("did not start", where=f"its output is in {self._log_file}")
            time.sleep(0.005)
        set_read_ahead(self.path, READ_AHEAD_KIB)

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self._wait_for_end()
                if self._stop.wait(_RESTART_PAUSE_S):
                    return
                _log.warning("the file daemon ended; starting a new one (%s)", self._log_file)
                self.ensure()
            except (NagaraError, OSError) as error:
                _log.warning("the file daemon could not be started again: %s", error)
                self._stop.wait(1.0)

    def _wait_for_end(self) -> None:
        """Returns when the daemon's end of a connection closes, or we are to stop."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            try:
                with socket_address(self.socket) as address:
                    client.connect(address)
            except OSError:
                return
            client.settimeout(0.2)
            while not self._stop.is_set():
                try:
                    if not client.recv(1):
                        return
                except TimeoutError:
                    continue

    def _answers(self) -> bool:
        try:
            self.ask({"op": "ping"}, time_limit_s=2.0)
        except DaemonError:
            return False
        return True

    def _held(self) -> int | None:
        descriptor = self._keeper.held(self._name)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor

    def _is_mounted(self) -> bool:
        return any(point.target == self.path for point in mount_points(self.path))


def device_of(path: Path) -> tuple[int, int] | None:
    """Device number of what is mounted at `path`, without asking its daemon."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split(" ")
        if unquoted(fields[4]) == str(path):
            major, _, minor = fields[2].partition(":")
            return int(major), int(minor)
    return None


def set_read_ahead(path: Path, kib: int) -> None:
    """How far ahead the kernel reads on the mount at `path`."""
    device = device_of(path)
    if device is not None:
        entry = Path(f"/sys/class/bdi/{device[0]}:{device[1]}/read_ahead_kb")
        with contextlib.suppress(OSError):
            entry.write_text(f"{kib}\n")


def abort_connection(path: Path) -> None:
    """Makes everything that waits on the FUSE mount at `path` fail with ENOTCONN.

    Only ever by the device number of our own mount. Without `fusectl` mounted the closing of all
    descriptors does the same.
    """
    device = device_of(path)
    if device is None:
        return
    control = Path("/sys/fs/fuse/connections")
    if not any(control.glob("*")):
        with contextlib.suppress(OSError):
            mount("fusectl", control, "fusectl", MS_NODEV | MS_NOSUID)
    try:
        (control / str(os.makedev(*device)) / "abort").write_text("1")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
