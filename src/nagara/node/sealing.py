"""Snapshots that lie encrypted: sealed before they go into the store, opened into memory.

    STATE/snapshots/sealing.json, optional:
    {"key_folder": "/etc/nagara/keys"}       TENANT.key in it: 32 bytes in base64, its owner's alone
    {"key_command": ["read-key", "nagara"]}  prints that; NAGARA_TENANT is in its environment

A sealed file is its content in frames of AES-256-GCM, each bound to the snapshot's name, its path
and its place (see `coding`; needs the extra `coded`). What is opened lies in a ramfs, which is
neither written to a disk nor swapped out, and is gone once the replica runs. Sealed snapshots share
no content with others. Blocking: worker threads.
"""

import base64
import binascii
import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nagara.base.errors import UsageError
from nagara.base.linux import MS_NODEV, MS_NOEXEC, MS_NOSUID, mount
from nagara.image.mounts import unmount_if_mounted
from nagara.store.coded_tier import read_tenant_key
from nagara.store.coding import FRAME_BYTES, KEY_BYTES, Coding

SETTINGS_NAME = "sealing.json"
_COMMAND_S = 30.0
_KINDS = ("key_folder", "key_command")


class Sealing:
    """The keys of one machine's snapshots. Safe to use from several threads.

    Args:
        settings: the file; without it nothing is sealed.
    """

    def __init__(self, settings: Path) -> None:
        self._path = settings
        self._given: dict[tuple[str, tuple[str, ...]], bytes] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether snapshots are to be sealed here."""
        return self._path.exists()

    def misfit(self, tenant: str, sealed_by: str | None) -> str | None:
        """Why a snapshot is not one to be restored here; None when it is."""
        if not self.is_on:
            return None if sealed_by is None else "it is sealed, and this machine has no key"
        if sealed_by is None:
            return "it is not sealed, and this machine seals its snapshots"
        try:
            return None if sealed_by == self._identity(tenant) else "it is sealed with another key"
        except UsageError as error:
            return f"it is sealed, and the key cannot be had: {error}"

    def seal(self, tenant: str, name: str, folder: Path) -> str:
        """Seals all files of a snapshot in place; returns what names the key.

        Raises:
            UsageError: there is no key, or the library is missing.
            OSError: a file cannot be written; the folder must not be used then.
        """
        coding = Coding(key=self._key(tenant))
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            sealed = path.with_name(f"{path.name}.sealed")
            count = coding.frame_count(path.stat().st_size)
            bound = _bound(name, str(path.relative_to(folder)))
            with path.open("rb") as source, sealed.open("xb") as target:
                for index in range(count):
                    content = source.read(FRAME_BYTES)
                    target.write(coding.encode(bound, index, count, content))
            sealed.replace(path)
        return self._identity(tenant)

    def open_file(self, tenant: str, name: str, inside: str, sealed: Path, target: Path) -> None:
        """Writes the content of a sealed file to `target`.

        Raises `CorruptError` for anything that was not sealed for that place; OSError; UsageError.
        """
        coding = Coding(key=self._key(tenant))
        whole = coding.most_bytes(FRAME_BYTES)
        size = sealed.stat().st_size
        count = max(1, -(-size // whole))
        with sealed.open("rb") as source, target.open("xb") as file:
            for index in range(count):
                stored = source.read(whole)
                content = coding.decode(
                    _bound(name, inside), index, count, stored, FRAME_BYTES, exact=index < count - 1
                )
                file.write(content)

    def _identity(self, tenant: str) -> str:
        return hashlib.sha256(b"nagara snapshots" + self._key(tenant)).hexdigest()[:16]

    def _key(self, tenant: str) -> bytes:
        """What a command gave is kept, for it may be slow; a file is read each time."""
        settings = self._settings()
        if "key_folder" in settings:
            return read_tenant_key(Path(settings["key_folder"]), tenant)
        command = tuple(str(word) for word in settings["key_command"])
        with self._lock:
            if (tenant, command) not in self._given:
                self._given[tenant, command] = _ask_for_key(command, tenant)
            return self._given[tenant, command]

    def _settings(self) -> dict[str, Any]:
        try:
            settings = json.loads(self._path.read_bytes())
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot be read: {error}", where=str(self._path)) from error
        if not isinstance(settings, dict) or len(settings) != 1 or not set(settings) <= set(_KINDS):
            raise UsageError(f"must have one of {', '.join(_KINDS)}", where=str(self._path))
        return settings


def _ask_for_key(command: Sequence[str], tenant: str) -> bytes:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "NAGARA_TENANT": tenant},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_S,
            check=True,
        )
        key = base64.b64decode(done.stdout.strip(), validate=True)
    except (OSError, subprocess.SubprocessError, binascii.Error) as error:
        raise UsageError(f"gives no key: {error}", where=command[0]) from error
    if len(key) != KEY_BYTES:
        raise UsageError(f"gives {len(key)} bytes, not {KEY_BYTES}", where=command[0])
    return key


@contextmanager
def memory_folder(at: Path) -> Iterator[Path]:
    """A folder whose files are in memory alone; afterwards only those keep it who use a file."""
    mount_memory(at)
    try:
        yield at
    finally:
        unmount_memory(at)


def mount_memory(at: Path) -> None:
    """Makes the folder `at`, in memory. Raises OSError."""
    at.mkdir(mode=0o700, exist_ok=True)
    mount("none", at, "ramfs", MS_NODEV | MS_NOSUID | MS_NOEXEC, "mode=700")


def unmount_memory(at: Path) -> None:
    """Gives it up, if it is there."""
    if unmount_if_mounted(at):
        at.rmdir()


def _bound(name: str, inside: str) -> str:
    return f"{name}/{inside}"
