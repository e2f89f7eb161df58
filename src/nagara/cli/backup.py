"""`nagara backup`: what cannot be made anew, in one file, and back from it.

    control.db    the state, as of one moment, also while nagara runs
    admin.token, api.key, secrets/    who may call, and apps' secrets
    pool.toml and the like are the user's own files and not part of it

Models, images and snapshots are not in it: they come from elsewhere or are made again.
"""

import os
import sqlite3
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import click

from nagara.base.durable import sync_folder
from nagara.base.errors import NagaraError, UsageError
from nagara.cli.settings import Settings
from nagara.control.state_lock import take_lock

_DATABASE = "control.db"
_FILES = ("admin.token", "api.key")
_SECRETS = "secrets"


@click.group()
def backup() -> None:
    """Save what cannot be made anew, and bring it back."""


@backup.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def save(settings: Settings, file: Path) -> None:
    """Write the state to FILE (.tar.gz), also while nagara runs.

    The file holds tokens and secrets: only its owner may read it.
    """
    if not (settings.state / _DATABASE).exists():
        raise UsageError(
            "there is no state here", where=str(settings.state),
            hint="a state in PostgreSQL is saved with pg_dump",
        )  # fmt: skip
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
            _write(settings.state, archive)
            archive.close()
            raw.flush()
            os.fsync(raw.fileno())
        temporary.replace(file)
        sync_folder(file.absolute().parent)
    except OSError as error:
        raise NagaraError(f"cannot be written: {error.strerror}", where=str(file)) from error
    finally:
        temporary.unlink(missing_ok=True)
    click.echo(f"saved to {file}")


def _write(state: Path, archive: tarfile.TarFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / _DATABASE
        with (
            closing(sqlite3.connect(f"file:{state / _DATABASE}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)  # of one moment, whoever writes meanwhile
        archive.add(copy, _DATABASE)
    for name in _FILES:
        if (state / name).exists():
            archive.add(state / name, name)
    if (state / _SECRETS).is_dir():
        archive.add(state / _SECRETS, _SECRETS)


@backup.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.pass_obj
def restore(settings: Settings, file: Path) -> None:
    """Bring the state back from FILE into an empty state folder."""
    state = settings.state
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(take_lock(state))  # nobody runs there
    if (state / _DATABASE).exists():
        raise UsageError(
            "there is a state already", where=str(state),
            hint="choose another folder with --state, or move that one away",
        )  # fmt: skip
    try:
        with tarfile.open(file) as archive:
            members = {member.name: member for member in archive.getmembers()}
            if _DATABASE not in members:
                raise UsageError("holds no state of nagara", where=str(file))
            _check(members, str(file))
            archive.extractall(state, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise NagaraError(f"cannot be read: {error}", where=str(file)) from error
    for path in (state / _DATABASE, *(state / name for name in _FILES)):
        if path.exists():
            path.chmod(0o600)
    click.echo(f"restored to {state}; start it with: nagara up")


def _check(members: dict[str, tarfile.TarInfo], where: str) -> None:
    for name, member in members.items():
        is_ours = name in (_DATABASE, *_FILES) or name.split("/")[0] == _SECRETS
        if not is_ours or not (member.isfile() or member.isdir()):
            raise UsageError(f"holds {name!r}, which no backup of nagara does", where=where)
