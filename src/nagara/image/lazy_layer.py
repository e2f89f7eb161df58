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
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from nagara.base.errors import NagaraError
from nagara.base.folder_lock import folder_lock
from nagara.base.linux import MNT_DETACH, MS_NODEV, MS_NOSUID, MS_RDONLY, mount, unmount
from nagara.image.fuse_wire import MAX_READ_BYTES
from nagara.image.mounts import MountError, device_of, mount_points

_log = logging.getLogger(__name__)
READ_AHEAD_KIB = 2048
MOUNT_SOURCE = "nagara"  # what mountinfo calls our FUSE mounts
_START_S = 20.0
_END_S = 5.0
_ASK_S = 10.0
_RESTART_PAUSE_S = 0.2
_BEAT_S = 2.0
_GONE = (ConnectionError, FileNotFoundError, ProcessLookupError)  # what asking a dead one raises
# So long a daemon may leave a ping without an answer before it counts as hung.
DEAF_S = 15.0
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
        with connected(path, time_limit_s) as client:
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
def connected(path: Path, time_limit_s: float = _ASK_S) -> Iterator[socket.socket]:
    """A connection to the daemon whose control socket that is. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(time_limit_s)
        with socket_address(path) as address:
            client.connect(address)
        yield client


def end_peer(client: socket.socket) -> None:
    """Waits until the process at the other end is gone, and kills it if it still listens."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    (process, _, _) = struct.unpack("3i", credentials)
    descriptor = os.pidfd_open(process)
    try:
        if _is_open(client):  # so the number still is that process's
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        end = select.poll()
        end.register(descriptor, select.POLLIN)
        end.poll(_END_S * 1000)
    finally:
        os.close(descriptor)


def _is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True


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
        self._lock_folder = folder / "locks" / stem
        self._keeper = keeper
        self._command = (*command, self._name, str(self.socket), *([tree] if tree else []))
        self._launch = launch
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def ensure(self) -> None:
        """Mounted and served afterwards. Raises `MountError`, `DaemonError`."""
        with self._lock, folder_lock(self._lock_folder):  # other processes mount here too
            if not self.is_mounted() or self._held() is None:
                self._mount()
            if not self._answers(DEAF_S):
                self._start()

    def ask(self, request: dict[str, Any], *, time_limit_s: float = _ASK_S) -> Any:
        """Raises `DaemonError`."""
        return ask_daemon(self.socket, request, time_limit_s=time_limit_s)

    def supervise(self) -> None:
        """From now on a dead daemon is replaced at once, by a thread of this process.

        One that lives and does not answer is ended, and replaced too.
        """
        if self._watcher is not None:
            return
        self._stop.clear()
        self._watcher = threading.Thread(target=self._watch, name="files-daemon", daemon=True)
        self._watcher.start()

    def leave(self) -> None:
        """Ends the supervision; mount and daemon stay."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def unmount(self) -> None:
        """Takes the layer down. Who still reads through it gets ENOTCONN afterwards."""
        self.leave()
        with self._lock, folder_lock(self._lock_folder):
            self._end()
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
                mount(MOUNT_SOURCE, self.path, "fuse", MS_RDONLY | MS_NODEV | MS_NOSUID, options)
            except OSError as error:
                raise MountError(
                    f"fuse mount refused: {error.strerror}", where=str(self.path)
                ) from error
            self._keeper.hold(self._name, descriptor)
        finally:
            os.close(descriptor)

    def _take_down(self) -> None:
        if self.is_mounted():
            abort_connection(self.path)
            unmount(self.path, MNT_DETACH)
        self._keeper.release(self._name)
        self._keeper.release(self._name + SERVED_MARK)

    def _start(self) -> None:
        self._end_deaf()
        self.socket.unlink(missing_ok=True)
        self._launch(self._command, self._log_file)
        deadline_s = time.monotonic() + _START_S
        while not self._answers(2.0):
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
        """Returns when the daemon ended, when it has to be ended, or we are to stop."""
        with contextlib.suppress(*_GONE), connected(self.socket) as client:
            client.settimeout(0.2)
            asked_s, answered_s = 0.0, time.monotonic()
            while not self._stop.is_set():
                with contextlib.suppress(TimeoutError):
                    if not client.recv(4096):
                        return
                    asked_s, answered_s = 0.0, time.monotonic()
                now_s = time.monotonic()
                if asked_s and now_s - asked_s > DEAF_S:
                    _log.error("the file daemon does not answer: it is ended")
                    end_peer(client)
                    return
                if not asked_s and now_s - answered_s > _BEAT_S:
                    client.sendall(b'{"op": "ping"}\n')
                    asked_s = now_s

    def _end(self) -> None:
        """Ends the daemon: it is asked to stop, and has to."""
        with contextlib.suppress(*_GONE), connected(self.socket, DEAF_S) as client:
            with contextlib.suppress(TimeoutError):
                client.sendall(b'{"op": "stop"}\n')
                while client.recv(4096):
                    pass
            end_peer(client)

    def _end_deaf(self) -> None:
        """One that does not answer must not go on beside its successor."""
        with contextlib.suppress(*_GONE), connected(self.socket) as client:
            end_peer(client)

    def _answers(self, time_limit_s: float) -> bool:
        try:
            self.ask({"op": "ping"}, time_limit_s=time_limit_s)
        except DaemonError:
            return False
        return True

    def _held(self) -> int | None:
        descriptor = self._keeper.held(self._name)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor

    def is_mounted(self) -> bool:
        """Whether there is a mount, served or not."""
        return any(point.target == self.path for point in mount_points(self.path))


def set_read_ahead(path: Path, kib: int) -> None:
    """How far ahead the kernel reads on the mount at `path`."""
    device = device_of(path)
    if device is not None:
        entry = Path(f"/sys/class/bdi/{device[0]}:{device[1]}/read_ahead_kb")
        with contextlib.suppress(OSError):
            entry.write_text(f"{kib}\n")


def connection_number(device: tuple[int, int]) -> int:
    """What the kernel calls the FUSE connection of a mount with that device number.

    Its own form of the number (include/linux/kdev_t.h), not the one that stat gives to programs:
    the two differ from minor 256 on.
    """
    major, minor = device
    return major << 20 | minor


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
        (control / str(connection_number(device)) / "abort").write_text("1")
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES, errno.EROFS):
            raise
