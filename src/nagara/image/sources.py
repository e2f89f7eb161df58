"""Where an image may come from, as a person writes it, and bringing it into a store.

    dir:PATH                      a folder
    venv:PATH                     a virtual environment, with the interpreter and libraries it needs
    oci:PATH[:TAG]                an OCI layout
    docker-archive:PATH[:IMAGE]   what `docker save` wrote
    registry:HOST/NAME[:TAG]      a registry
    model:PATH                    a model folder; links into a download cache are followed
    layer:PATH                    an upper layer of overlay, whose marks are kept

Blocking; belongs to one thread.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nagara.base.errors import UsageError
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError
from nagara.image.file_memory import FileMemory
from nagara.image.folder_import import import_folder
from nagara.image.identity import GROUP, KEY, PASSWD, find_file, find_identity, to_config
from nagara.image.images import Added, Image, add_image, list_images
from nagara.image.lazy_layer import MOUNT_SOURCE
from nagara.image.model_import import read_model
from nagara.image.mounts import mount_points
from nagara.image.oci import OciLayout, import_docker_archive, import_manifest
from nagara.image.prefetch import boot_id, check_complete
from nagara.image.registry import Credentials, Registry, parse_reference, read_credentials
from nagara.image.tree import Node
from nagara.image.tree_state import tree_state
from nagara.image.venv_import import import_venv, venv_roots
from nagara.store.roots import read_list, write_root
from nagara.store.store import Store

_log = logging.getLogger(__name__)
_TABLE_LIMIT_BYTES = 1 << 20
_MISSING = "Missing"  # in an image's configuration: libraries this machine does not have
KINDS = ("dir", "venv", "oci", "docker-archive", "registry", "model", "layer")
_FOLDERS = ("dir", "venv", "model", "layer")


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source; `wanted` is a tag or image name where there may be several."""

    kind: str
    place: str
    wanted: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" + (f":{self.wanted}" if self.wanted else "")


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """How registries are reached."""

    mirrors: Sequence[str] = ()
    plain_http: bool = False
    credentials: Credentials | None = None
    login_file: Path = Path("~/.docker/config.json")


def parse_source(text: str) -> Source:
    """Raises `UsageError` naming the kinds."""
    kind, colon, place = text.partition(":")
    if not colon or kind not in KINDS or not place:
        raise UsageError(
            f"{text!r} is no source of an image",
            hint="write one of " + ", ".join(f"{each}:…" for each in KINDS),
        )
    wanted = None
    if kind in ("oci", "docker-archive") and not Path(place).exists() and ":" in place:
        # `docker-archive:a.tar:team/app:1.2`: the path ends at the first colon that makes it one.
        for at in (i for i, c in enumerate(place) if c == ":"):
            if Path(place[:at]).exists():
                place, wanted = place[:at], place[at + 1 :]
                break
    return Source(kind, place, wanted or None)


def memory_path(store: Store) -> Path:
    """Where a tenant's memory of imported files is."""
    return store.local.root / "imports.sqlite"


def import_image(
    store: Store,
    text: str,
    name: str,
    access: RegistryAccess | None = None,
    *,
    watch: Callable[[ContentWriter], None] = lambda writer: None,
) -> tuple[Added, tuple[str, ...]]:
    """Brings an image into the store under a name; returns it and what it will miss.

    Of a source that was imported before only what has changed is read.

    Args:
        watch: called once, with what counts the files that are done.

    Raises:
        UsageError: no such source.
        ImageError: the source cannot be kept as it is; says why.
    """
    source = parse_source(text)
    if source.kind in _FOLDERS:
        _refuse_own(Path(source.place), store)
    with FileMemory(memory_path(store)) as memory, ContentWriter(store, memory) as writer:
        watch(writer)
        found = _read(source, store, writer, access or RegistryAccess())
    if isinstance(found, Image):
        # Its trace is of use at once, but the starts to be recorded are this name's own.
        added = _added_before(store, replace(found, name=name, source=str(source), starts=0))
        missing = tuple((found.config or {}).get(_MISSING, ()))
    else:
        missing = found.missing
        config = {**found.config, **_identity(store, found)}
        added = add_image(
            store,
            name,
            found.tree,
            str(source),
            new=writer.new,
            is_layer=source.kind == "layer",
            config={**config, **({_MISSING: list(missing)} if missing else {})},
            source_state=found.state,
        )
    image = added.image
    # Everything is here: the next mount needs no daemon.
    local = store.local
    if not local.folder.ledger.is_complete(local.tenant, str(image.list), boot_id()):
        check_complete(store, image.list, [*read_list(store, image.list), image.list])
    return added, missing


def _refuse_own(path: Path, store: Store) -> None:
    """Raises `SourceError` for what nagara itself keeps and mounts.

    The store is written by the import, and a part of an image's mount is only half of it: an
    index without contents, or contents without names.
    """
    place = path.resolve()
    own = [store.local.folder.path.resolve()]
    for point in mount_points():
        is_lazy = (point.kind, point.source) == ("fuse", MOUNT_SOURCE)
        if is_lazy or (point.kind == "erofs" and Path(point.source).is_relative_to(own[0])):
            own.append(point.target)
    for each in own:
        if place.is_relative_to(each) or each.is_relative_to(place):
            raise SourceError(
                "belongs to nagara itself and is no source of an image",
                where=str(each),
                hint="import a folder that does not hold it",
            )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a source holds."""

    tree: Node
    config: Mapping[str, Any]
    missing: tuple[str, ...] = ()
    state: str | None = None


def _identity(store: Store, found: _Found) -> dict[str, Any]:
    """The numbers of the configuration's user, where it names one."""
    user = found.config.get("User")
    if not user:
        return {}
    tables = [_table(store, found.tree, path) for path in (PASSWD, GROUP)]
    return {KEY: to_config(find_identity(str(user), *tables))}


def _table(store: Store, tree: Node, path: bytes) -> bytes:
    node = find_file(tree, path)
    if node is None or node.size > _TABLE_LIMIT_BYTES:
        return b""
    return node.inline or (store.read(node.content) if node.content else b"")


def _added_before(store: Store, image: Image) -> Added:
    """An image whose source is as it was: only its name is new."""
    write_root(store.local, image.to_root())
    objects = read_list(store, image.list)
    return Added(image, len(objects), sum(each.size for each in objects), 0, 0, image.index.size, 0)


def _known(store: Store, state: str) -> Image | None:
    """An image that was made of the same and still is all here."""
    for image in list_images(store.local):
        if image.source_state == state and all(
            store.local.has(each) for each in (image.list, *read_list(store, image.list))
        ):
            return image
    return None


def _read(
    source: Source, store: Store, writer: ContentWriter, access: RegistryAccess
) -> "_Found | Image":
    path = Path(source.place)
    state: str | None
    if source.kind == "venv":
        state = tree_state(venv_roots(path))
        if state is not None and (known := _known(store, state)) is not None:
            return known
        venv = import_venv(path, writer)
        config = {"Env": [f"PATH={venv.python.parent}:/usr/bin:/bin"]}
        return _Found(venv.tree, config, venv.missing, state)
    if source.kind in ("dir", "layer"):
        if not path.is_dir():
            raise UsageError("is no folder", where=str(path))
        is_layer = source.kind == "layer"
        state = tree_state([path.absolute()])
        if state is not None and (known := _known(store, f"{source.kind} {state}")) is not None:
            return known
        tree = import_folder(path.absolute(), writer, is_layer=is_layer)
        return _Found(tree, {}, state=state and f"{source.kind} {state}")
    if not path.exists() and source.kind != "registry":
        raise SourceError("is not there", where=str(path))
    if source.kind == "model":
        return _Found(read_model(path, writer), {})
    if source.kind == "docker-archive":
        state = _file_state(path, source.wanted)
        if (known := _known(store, state)) is not None:
            return known
        return _Found(*import_docker_archive(path, writer, source.wanted), state=state)
    blobs: OciLayout | Registry
    if source.kind == "oci":
        blobs = OciLayout(path)
        manifest = blobs.manifest(source.wanted)
    else:
        blobs = _registry(source.place, writer, access)
        manifest = blobs.manifest()
    canonical = json.dumps(manifest, sort_keys=True).encode()
    state = f"manifest:{hashlib.sha256(canonical).hexdigest()}"
    if (known := _known(store, state)) is not None:
        return known
    return _Found(*import_manifest(blobs, manifest, writer), state=state)


def _file_state(path: Path, wanted: str | None) -> str:
    state = path.stat()
    parts = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return "file:" + ":".join(map(str, (*parts, wanted or "")))


def _registry(place: str, writer: ContentWriter, access: RegistryAccess) -> Registry:
    reference = parse_reference(place)
    credentials = access.credentials
    if credentials is None:
        credentials = read_credentials(reference.host, access.login_file.expanduser())
    return Registry(
        reference,
        writer.store.local.partial,
        credentials=credentials,
        mirrors=access.mirrors,
        plain_http=access.plain_http,
    )
