"""The values of apps' secrets, kept as files of the state folder.

    secrets/TENANT/NAME    0600, in folders 0700

They are read when a replica is started and handed to its node; nothing else here keeps them, and
a replica that is saved gets none (see `Machines`). Blocking, for small files.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from nagara.base.durable import write_durably
from nagara.base.errors import UsageError
from nagara.contract.node import StartFailedError

SECRET_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}")
_LIMIT_BYTES = 64 << 10


class AppSecrets:
    """The secrets below one state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._state = state_dir
        self._folder = state_dir / "secrets"

    def put(self, tenant: str, name: str, value: str) -> None:
        """Sets a secret, also anew: replicas that start from now on get it.

        Raises:
            UsageError: the name or the value cannot be those of an environment variable.
        """
        if not SECRET_NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is not a name of a secret", hint="as of a variable: HF_TOKEN"
            )
        if "\0" in value or not value or len(value.encode()) > _LIMIT_BYTES:
            raise UsageError("a secret has 1 to 65536 bytes, none of them zero", where=name)
        path = self._path(tenant, name)
        owner = self._state.stat()
        for folder in (self._folder, path.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
            _give(folder, owner)
        write_durably(path, value.encode())
        _give(path, owner)

    def names(self, tenant: str) -> list[str]:
        """Those that are set."""
        found = (self._folder / tenant).glob("[A-Za-z_]*")
        return sorted(path.name for path in found)

    def remove(self, tenant: str, name: str) -> None:
        """Forgets a secret. Raises `UsageError` when there is none."""
        try:
            self._path(tenant, name).unlink()
        except OSError as error:
            raise UsageError(f"no secret {name!r} is set", hint="nagara secret ls") from error

    def values(self, tenant: str, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Names with their values. Raises `StartFailedError` naming what is not set."""
        return tuple((name, self._value(tenant, name)) for name in names)

    def _value(self, tenant: str, name: str) -> str:
        try:
            return self._path(tenant, name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise StartFailedError(
                f"its secret {name} is not set", hint=f"nagara secret set {name}"
            ) from error

    def _path(self, tenant: str, name: str) -> Path:
        return self._folder / tenant / Path(name).name


def _give(path: Path, owner: os.stat_result) -> None:
    """To whom the state folder belongs: the control process may have given up root."""
    if os.geteuid() == 0:
        os.chown(path, owner.st_uid, owner.st_gid)
