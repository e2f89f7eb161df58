"""The model folders of this machine: names, digests, paths, and how one comes and goes.

    MODELS/NAME/                   a Hugging Face style folder, never changed after it appeared
    MODELS/NAME/nagara-model.json  its record: digest, files, source, licence
    MODELS/.adding-XXXX/           a folder in the making; left over after a crash, then removed

It knows files, not models: what a good model folder holds is checked by the caller. Called from
the command line and, to find a model, by the node agent; `find_model` reads one small file, the
other functions block for as long as the files are large.

    ModelError
    └── UnknownModelError   no model of that name
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nagara.base.durable import sync_folder, write_durably
from nagara.base.errors import NagaraError, UsageError
from nagara.base.folder_lock import folder_lock

RECORD_NAME = "nagara-model.json"
_ADDING = ".adding-"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FICLONE = 0x40049409  # linux/fs.h: the copy shares the original's blocks until one is written


class ModelError(NagaraError):
    """A model folder cannot be added, used or removed."""


class UnknownModelError(ModelError):
    """No model of that name is on this machine."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model; `path` is relative to its folder, with `/`."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """One model of this machine."""

    name: str
    path: Path
    digest: str  # "sha256:..." over names, sizes and contents: equal digests, equal models
    size_bytes: int
    source: str  # where it came from, for people
    licence: str | None  # None when its folder did not say


@dataclass(frozen=True, slots=True)
class Origin:
    """What the record of a model says about where it came from."""

    source: str
    licence: str | None = None
    tools: Mapping[str, str] | None = None  # versions of what made it


def check_model_name(name: str) -> None:
    """Raises `UsageError` unless the name can be a folder and part of an address."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a model",
            hint="up to 64 of a-z, 0-9, `.`, `_`, `-`, beginning with a letter or digit; "
            "choose one with --name",
        )


def find_model(models_dir: Path, name: str) -> ModelFolder:
    """The model of that name, its files there and of their recorded sizes.

    Raises:
        UnknownModelError: no such model; names the known ones.
        ModelError: its folder is damaged; names the file.
    """
    check_model_name(name)
    folder = models_dir / name
    try:
        record: dict[str, Any] = json.loads((folder / RECORD_NAME).read_bytes())
        files = [ModelFile(**entry) for entry in record["files"]]
        model = ModelFolder(
            name=name,
            path=folder,
            digest=record["digest"],
            size_bytes=sum(file.size_bytes for file in files),
            source=record["source"],
            licence=record["licence"],
        )
    except FileNotFoundError:
        known = ", ".join(_names(models_dir)) or "none"
        raise UnknownModelError(
            f"no model named {name!r} (known: {known})",
            where=str(models_dir),
            hint=f"add one: `nagara models add DIR --name {name}`, or `nagara models add smollm2`",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(name, folder / RECORD_NAME, f"cannot be read: {error!r}") from error
    for file in files:
        path = folder / file.path
        size = path.stat().st_size if path.is_file() else None
        if size != file.size_bytes:
            state = "is missing" if size is None else f"has {size} bytes, not {file.size_bytes}"
            raise _damaged(name, path, state)
    return model


def list_models(models_dir: Path) -> tuple[ModelFolder, ...]:
    """All models, by name. Raises `ModelError` for the first damaged one."""
    return tuple(find_model(models_dir, name) for name in _names(models_dir))


def digest_files(files: tuple[ModelFile, ...]) -> str:
    """The digest of a model: sha256 over its files' names, sizes and sha256, sorted by name."""
    listing = sorted([file.path, file.size_bytes, file.sha256] for file in files)
    return "sha256:" + hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def read_files(folder: Path) -> tuple[ModelFile, ...]:
    """Every file that belongs to the model in `folder`, read in full for its hash.

    Hidden files and folders (version control, download caches) and a record do not belong to it.

    Raises:
        ModelError: something in it is no readable regular file; names it.
    """
    files = []
    for path in model_files(folder):
        try:
            with path.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
                size_bytes = os.fstat(stream.fileno()).st_size
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", where=str(path)) from error
        files.append(ModelFile(path.relative_to(folder).as_posix(), size_bytes, sha256))
    return tuple(files)


def copy_files(source: Path, target: Path) -> None:
    """Copies what belongs to the model; shares blocks where the file system can.

    Links are followed: a model folder of a download cache consists of them.
    """
    for path in model_files(source):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("rb") as reader, copy.open("xb") as writer:
                try:
                    fcntl.ioctl(writer, _FICLONE, reader.fileno())
                except OSError:
                    shutil.copyfileobj(reader, writer, 1 << 20)
        except OSError as error:
            raise ModelError(f"cannot be copied: {error.strerror}", where=str(path)) from error


@contextmanager
def adding(models_dir: Path) -> Iterator[Path]:
    """An empty folder to prepare a model in; `publish_model` takes it from there.

    One process at a time adds or removes. The folder is gone afterwards, whatever happened.
    """
    with folder_lock(models_dir):
        for left_over in unfinished_models(models_dir):  # holding the lock: a crashed process's
            shutil.rmtree(left_over)
        staged = Path(tempfile.mkdtemp(dir=models_dir, prefix=_ADDING))
        try:
            yield staged
        finally:
            if staged.exists():
                shutil.rmtree(staged)


def unfinished_models(models_dir: Path) -> list[Path]:
    """Folders in the making: of whoever holds the lock, or left over."""
    return sorted(models_dir.glob(f"{_ADDING}*"))


def publish_model(
    models_dir: Path,
    staged: Path,
    name: str,
    origin: Origin,
    weights: Mapping[str, str] | None = None,
) -> ModelFolder:
    """Makes the prepared folder a model: all its bytes are on the disk before its name is there.

    Call it inside `adding`.

    Args:
        weights: tensor → hash of its values, for whoever reads them; None where not known.

    Raises:
        ModelError: a model of that name exists.
    """
    check_model_name(name)
    folder = models_dir / name
    if folder.exists():
        raise ModelError(
            "another model of this name exists",
            where=str(folder),
            hint=f"choose another --name, or first `nagara models rm {name}`",
        )
    files = read_files(staged)
    record: dict[str, Any] = {
        "name": name,
        "digest": digest_files(files),
        "source": origin.source,
        "licence": origin.licence,
        "tools": dict(origin.tools or {}),
        "files": [asdict(file) for file in files],
    }
    _make_durable(staged)
    if weights is not None:
        record["weights"] = dict(weights)
    text = json.dumps(record, indent=2) + "\n"
    write_durably(staged / RECORD_NAME, text.encode(), mode=0o644)
    staged.rename(folder)
    sync_folder(models_dir)
    return find_model(models_dir, name)


def remove_model(models_dir: Path, name: str) -> None:
    """Removes a model, damaged or not. Raises `UnknownModelError` when there is none."""
    check_model_name(name)
    folder = models_dir / name
    if not folder.is_dir():
        find_model(models_dir, name)
    with adding(models_dir) as scratch:
        # Its name goes first and at once: nobody finds half a model.
        folder.rename(scratch / "removed")
        sync_folder(models_dir)


def _names(models_dir: Path) -> list[str]:
    return sorted(path.parent.name for path in models_dir.glob(f"[!.]*/{RECORD_NAME}"))


def _damaged(name: str, path: Path, state: str) -> ModelError:
    return ModelError(
        f"the model {name!r} is damaged: the file {state}",
        where=str(path),
        hint=f"remove it with `nagara models rm {name}` and add it again",
    )


def model_files(folder: Path) -> Iterator[Path]:
    """The files that belong to a model, by name; see `read_files`. Raises `ModelError`."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == RECORD_NAME:
            continue
        if path.is_dir():
            yield from model_files(path)
        elif path.is_file():
            yield path
        else:
            state = "is a link to nothing" if path.is_symlink() else "is not a regular file"
            raise ModelError(state, where=str(path), hint="fetch the model folder again")


def _make_durable(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.iterdir():
        if path.is_dir():
            _make_durable(path)
            continue
        path.chmod(0o644)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    sync_folder(folder)
