"""The nearest tier: a folder of whole, verified object files, bounded, the longest unused go first.

    FOLDER/ledger.sqlite
    FOLDER/tenants/TENANT/sha256/NAME    an object, mode 0444; appears by rename only
    FOLDER/tenants/TENANT/chunks/NAME    the chunk list of a large object
    FOLDER/tenants/TENANT/proven/NAME    a large object's second name (see `proven_files`)
    FOLDER/tenants/TENANT/partial/       what is being written; may be removed when nobody runs
    FOLDER/tenants/TENANT/roots/         named documents that keep objects alive (see `roots`)

An object is trusted without being read when its file still has the inode, size and change time
that were recorded after its content had been checked and had reached the disk. So a crash or a
write from outside costs a second look, never a wrong byte. Rot of a disk's sectors changes no
inode: only the slow scrub (`LocalTier.verify` of everything) finds it.

Called from any thread; the same folder may be open in several processes.
"""

import contextlib
import errno
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nagara.base.errors import UsageError
from nagara.store.errors import BadNameError, CorruptError, FullError
from nagara.store.flights import Flights
from nagara.store.hashing import hash_file
from nagara.store.ledger import Ledger, Pin, Proof
from nagara.store.names import ObjectName, large_names, parse_name, unpack_names
from nagara.store.proven_files import ProvenFiles
from nagara.store.statistics import TierStatistics
from nagara.store.syncer import Syncer

DEFAULT_TENANT = "default"
PUBLIC_TENANT = "public"
_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_BLOCK = 4096  # what a file takes is counted in these before it is there
_PROOFS_IN_MEMORY = 200_000
_PROVING_S = 3600.0
_SLACK = 0.05  # of the bound: an eviction frees this much more than was asked for


def check_tenant(tenant: str) -> None:
    """Raises `UsageError` unless the name can be a folder and part of an address."""
    if not _TENANT.fullmatch(tenant):
        raise UsageError(
            f"{tenant!r} cannot name a tenant", hint="up to 63 of a-z, 0-9 and `-`, no `-` first"
        )


class ObjectFolder:
    """All tenants' objects on one disk, under one bound.

    Args:
        path: the folder; made if need be.
        limit_bytes: the bound; None leaves the disk itself as the bound.
    """

    def __init__(self, path: Path, limit_bytes: int | None = None) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = path
        self.limit_bytes = limit_bytes
        self.ledger = Ledger(path / "ledger.sqlite")
        self.hashers = ThreadPoolExecutor(os.cpu_count() or 1, "hash")
        self.syncer = Syncer(self.ledger, path)
        self._tenants: dict[str, LocalTier] = {}
        self._lists: dict[tuple[str, str], frozenset[str]] = {}
        self._lock = threading.Lock()

    def tenant(self, name: str) -> "LocalTier":
        """One tenant's part."""
        with self._lock:
            if name not in self._tenants:
                check_tenant(name)
                self._tenants[name] = LocalTier(self, name)
            return self._tenants[name]

    def tenant_names(self) -> list[str]:
        """Who has a part here."""
        folder = self.path / "tenants"
        return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []

    def make_room(self, space: int) -> None:
        """Evicts until `space` more bytes fit below the bound.

        Raises `FullError` when what is pinned leaves too little.
        """
        if self.limit_bytes is None:
            return
        over = self.ledger.total_bytes() + space - self.limit_bytes
        if over > 0 and (
            space > self.limit_bytes or self._evict(over + int(_SLACK * self.limit_bytes)) < over
        ):
            raise FullError("the object folder is full", where=str(self.path))

    def relieve(self, space: int) -> None:
        """After the disk itself was full: frees at least `space` bytes if it can."""
        self._evict(space)

    def close(self) -> None:
        """Waits until what was adopted is on the disk and recorded."""
        self.syncer.close()
        self.hashers.shutdown()
        self.ledger.close()

    def _evict(self, wanted: int) -> int:
        return self.ledger.evict(wanted, self._pinned, self._remove)

    def _remove(self, tenant: str, name: str) -> None:
        self.tenant(tenant).remove_files(parse_name(name))

    def _pinned(self, pins: list[Pin]) -> Callable[[str, str], bool]:
        wanted = {(pin.tenant, pin.list) for pin in pins}
        self._lists = {key: names for key, names in self._lists.items() if key in wanted}
        blocked = set()
        for key in wanted - self._lists.keys():
            names = self.tenant(key[0]).listed(key[1])
            if names is None:
                blocked.add(key[0])  # who needs what is unknown: everything stays
            else:
                self._lists[key] = names
        lists = [(tenant, names) for (tenant, _), names in self._lists.items()]
        return lambda tenant, name: (
            tenant in blocked or any(tenant == owner and name in names for owner, names in lists)
        )


class LocalTier:
    """One tenant's objects in an `ObjectFolder`."""

    def __init__(self, folder: ObjectFolder, tenant: str) -> None:
        self.folder = folder
        self.tenant = tenant
        self.root = folder.path / "tenants" / tenant
        self.objects = self.root / "sha256"
        self.partial = self.root / "partial"
        self.proven = ProvenFiles(self.root / "proven", folder.ledger, tenant)
        self.statistics = TierStatistics("local")
        for part in ("sha256", "partial", "proven", "chunks", "roots"):
            (self.root / part).mkdir(parents=True, exist_ok=True)
        self._proofs: dict[ObjectName, Proof] = {}
        self._proving = Flights()

    def path(self, name: ObjectName) -> Path:
        """Where the object is, or would be."""
        return self.objects / str(name)

    def is_all_proven(self, limit: int) -> bool:
        """There are at most so many objects, and each is as it was when it was proven.

        What comes later is verified before it has a name, so the folder may be read past everyone.
        """
        recorded: dict[str, Proof] | None = None
        with os.scandir(self.objects) as entries:
            for number, entry in enumerate(entries):
                if number >= limit:
                    return False
                if recorded is None:
                    recorded = self.folder.ledger.proofs(self.tenant, limit)
                state = entry.stat(follow_symlinks=False)
                now = Proof(state.st_ino, state.st_size, state.st_ctime_ns)
                if recorded.get(entry.name) != now and not self._has_proven(entry.name, now):
                    return False
        return True

    def offer_large(self, list_name: ObjectName) -> bool:
        """Lets proven large objects of a list that is here be read past everyone; any there?"""
        try:
            raw = self.path(list_name).read_bytes()
        except FileNotFoundError:
            return False
        offered = [self.proven.offer(name, self.path(name)) for name in large_names(raw)]
        return any(offered)

    def list_path(self, name: ObjectName) -> Path:
        """Where the object's chunk list is, or would be."""
        return self.root / name.list_key

    def has(self, name: ObjectName) -> bool:
        """The whole object is here. It is not verified by this call."""
        try:
            return os.stat(self.path(name)).st_size == name.size  # noqa: PTH116 - asked 50,000 times
        except FileNotFoundError:
            return False

    def open(self, name: ObjectName) -> int | None:
        """A descriptor of the verified object, or None when it is not here (any more).

        The first open since it was last proven reads it all. One that is wrong is removed.
        """
        begun_s = time.monotonic()
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self.statistics.miss(time.monotonic() - begun_s)
            return None
        try:
            if not self._is_proven(name, descriptor) and not self._prove_once(name, descriptor):
                os.close(descriptor)
                self.discard(name)
                self.statistics.fault()
                return None
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        self.folder.ledger.use(self.tenant, str(name))
        self.statistics.hit(name.size, time.monotonic() - begun_s)
        return descriptor

    def open_unproven(self, name: ObjectName) -> int | None:
        """A descriptor of a whole object that nobody has proven yet; None for any other."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        if os.fstat(descriptor).st_size == name.size and not self._is_proven(name, descriptor):
            return descriptor
        os.close(descriptor)
        return None

    def set_proven(self, name: ObjectName, descriptor: int, before: Proof) -> bool:
        """The file was read and is right; False when it is not what it was before that."""
        state = os.fstat(descriptor)
        if Proof(state.st_ino, state.st_size, state.st_ctime_ns) != before:
            return False
        self._remember(name, before)
        self.folder.ledger.add(self.tenant, str(name), state.st_blocks * 512)
        self.folder.syncer.add(self.tenant, self.path(name), before)
        return True

    def take_apart(self, name: ObjectName) -> None:
        """A large object has a wrong chunk: it is one in the making again, and keeps the rest."""
        self._proofs.pop(name, None)
        self.proven.withdraw(name)
        with contextlib.suppress(FileNotFoundError):
            self.path(name).chmod(0o600)
            self.path(name).rename(self.partial / str(name))

    def verify(self, name: ObjectName) -> bool:
        """Reads the whole object, whatever is recorded; removes it and returns False when wrong."""
        try:
            descriptor = self.open_past_cache(name)
        except FileNotFoundError:
            return False
        try:
            if self._prove(name, descriptor):
                return True
        finally:
            os.close(descriptor)
        self.discard(name)
        return False

    def open_past_cache(self, name: ObjectName) -> int:
        """A descriptor that reads what is on the disk, where the file system has such.

        Reads through it begin and end at whole pages. Raises FileNotFoundError.
        """
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self.path(name), flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        return os.open(self.path(name), flags)

    def discard(self, name: ObjectName) -> None:
        """Removes the object for good."""
        self.remove_files(name)
        self.folder.ledger.drop(self.tenant, str(name))

    def remove_files(self, name: ObjectName) -> None:
        """Removes the files and leaves the ledger to the caller."""
        self._proofs.pop(name, None)
        self.path(name).unlink(missing_ok=True)
        if name.is_chunked:
            self.proven.withdraw(name)
            self.list_path(name).unlink(missing_ok=True)
            (self.partial / str(name)).unlink(missing_ok=True)

    def adopt(self, temporary: Path, name: ObjectName, chunk_list: bytes | None) -> None:
        """Makes the file an object. Its content was verified while it was written.

        It is there for everyone at once and becomes *proven* when it has reached the disk.
        """
        state = temporary.stat()
        if state.st_nlink == 1:  # else it is somebody's file, and keeps its mode
            temporary.chmod(0o444)
        space = state.st_blocks * 512
        self.folder.ledger.add(self.tenant, str(name), space)
        if chunk_list is not None:
            self.write_list(name, chunk_list)
        path = self.path(name)
        temporary.rename(path)
        # Once more: an eviction may have taken the row before the file had its name.
        self.folder.ledger.add(self.tenant, str(name), space)
        self._note_proven(name, str(path))

    def keep(self, contents: Sequence[tuple[ObjectName, bytes | memoryview]]) -> None:
        """Makes small contents objects, many at a time. The caller has verified them.

        Raises `FullError`; what came before it is kept.
        """
        rows = [(str(name), -(-name.size // _BLOCK) * _BLOCK) for name, _ in contents]
        self.folder.make_room(sum(space for _, space in rows))
        self.folder.ledger.add_many(self.tenant, rows)
        partial, objects = f"{self.partial}/.new-{os.getpid()}-", f"{self.objects}/"
        with full_disk_named(self.partial):
            for (_, content), (text, _) in zip(contents, rows, strict=True):
                making = f"{partial}{threading.get_ident()}-{text}"
                try:
                    _write_new(making, content)
                    os.rename(making, objects + text)  # noqa: PTH104 - by the thousand
                except BaseException:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(making)  # noqa: PTH108
                    raise
        # Once more: an eviction may have taken rows before the files had their names.
        self.folder.ledger.add_many(self.tenant, rows)
        for (name, _), (text, _) in zip(contents, rows, strict=True):
            self._note_proven(name, objects + text)

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """A new file in `partial/`; removed afterwards unless it was adopted.

        Raises `FullError` from a full disk inside the block.
        """
        descriptor, name = tempfile.mkstemp(dir=self.partial, prefix=".new-")
        os.close(descriptor)
        try:
            with full_disk_named(self.partial):
                yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def listed(self, list_name: str) -> frozenset[str] | None:
        """What a pinned reference list protects (itself too); None when it cannot be read."""
        try:
            raw = (self.objects / list_name).read_bytes()
        except OSError:
            return None
        return frozenset(str(name) for name in unpack_names(raw)) | {list_name}

    def write_list(self, name: ObjectName, raw: bytes) -> None:
        """Keeps the chunk list of a large object."""
        target = self.list_path(name)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".new-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(raw)
        Path(temporary).rename(target)

    def _has_proven(self, text: str, now: Proof) -> bool:
        """This process has verified it, and it is on its way to the disk."""
        try:
            return self._proofs.get(parse_name(text)) == now
        except BadNameError:
            return False

    def _is_proven(self, name: ObjectName, descriptor: int) -> bool:
        state = os.fstat(descriptor)
        now = Proof(state.st_ino, state.st_size, state.st_ctime_ns)
        if self._proofs.get(name) == now:
            return True
        if self.folder.ledger.proof(self.tenant, str(name)) != now:
            return False
        self._remember(name, now)
        return True

    def _prove_once(self, name: ObjectName, descriptor: int) -> bool:
        """However many open it at the same time, one of them reads it."""
        deadline_s = time.monotonic() + _PROVING_S
        self._proving.run(name, lambda: self._prove(name, descriptor), deadline_s)
        return self._is_proven(name, descriptor)

    def _prove(self, name: ObjectName, descriptor: int) -> bool:
        state = os.fstat(descriptor)
        try:
            is_right = state.st_size == name.size and (
                hash_file(descriptor, name.size, self.folder.hashers).name == name
            )
        except CorruptError:
            return False
        proof = Proof(state.st_ino, state.st_size, state.st_ctime_ns)
        return is_right and self.set_proven(name, descriptor, proof)

    def _note_proven(self, name: ObjectName, path: str) -> None:
        """The object's file was verified before it got its name."""
        try:
            state = os.stat(path)  # noqa: PTH116 - by the thousand
        except FileNotFoundError:  # another process needed the room at once
            self.folder.ledger.drop(self.tenant, str(name))
            return
        proof = Proof(state.st_ino, state.st_size, state.st_ctime_ns)
        self._remember(name, proof)
        self.folder.syncer.add(self.tenant, Path(path), proof)

    def _remember(self, name: ObjectName, proof: Proof) -> None:
        if len(self._proofs) >= _PROOFS_IN_MEMORY:
            with contextlib.suppress(KeyError, StopIteration, RuntimeError):
                del self._proofs[next(iter(self._proofs))]
        self._proofs[name] = proof


def _write_new(path: str, content: bytes | memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        os.fchmod(descriptor, 0o444)  # whatever the umask is
        view = memoryview(content)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def full_disk_named(where: Path) -> Iterator[None]:
    """Turns the kernel's ways of saying *full* into `FullError`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError("the disk is full", where=str(where)) from error
        raise
