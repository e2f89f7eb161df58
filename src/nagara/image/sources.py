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

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nagara.base.errors import UsageError
from nagara.image.content_writer import ContentWriter
from nagara.image.folder_import import import_folder
from nagara.image.images import Added, add_image
from nagara.image.model_import import import_model
from nagara.image.oci import OciLayout, import_docker_archive, import_manifest
from nagara.image.prefetch import check_complete
from nagara.image.registry import Credentials, Registry, parse_reference, read_credentials
from nagara.image.tree import Node
from nagara.image.venv_import import import_venv
from nagara.store.roots import read_list
from nagara.store.store import Store

_log = logging.getLogger(__name__)
KINDS = ("dir", "venv", "oci", "docker-archive", "registry", "model", "layer")


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


def import_image(
    store: Store, text: str, name: str, access: RegistryAccess | None = None
) -> tuple[Added, tuple[str, ...]]:
    """Brings an image into the store under a name; returns it and what it will miss.

    Raises:
        UsageError: no such source.
        ImageError: the source cannot be kept as it is; says why.
    """
    source = parse_source(text)
    missing: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    with ContentWriter(store) as writer:
        if source.kind == "venv":
            found = import_venv(Path(source.place), writer)
            tree, missing = found.tree, found.missing
            config = {"Env": [f"PATH={found.python.parent}:/usr/bin:/bin"]}
        else:
            tree, config = _read(source, writer, access or RegistryAccess())
    is_layer = source.kind == "layer"
    added = add_image(
        store, name, tree, str(source), new=writer.new, is_layer=is_layer, config=config
    )
    image = added.image
    # Everything is here: the next mount needs no daemon.
    check_complete(store, image.list, [*read_list(store, image.list), image.list])
    return replace(added, image=image), missing


def _read(
    source: Source, writer: ContentWriter, access: RegistryAccess
) -> tuple[Node, dict[str, Any]]:
    path = Path(source.place)
    if source.kind in ("dir", "layer"):
        if not path.is_dir():
            raise UsageError("is no folder", where=str(path))
        return import_folder(path.absolute(), writer, is_layer=source.kind == "layer"), {}
    if source.kind == "model":
        return import_model(path, writer), {}
    if source.kind == "oci":
        layout = OciLayout(path)
        return import_manifest(layout, layout.manifest(source.wanted), writer)
    if source.kind == "docker-archive":
        return import_docker_archive(path, writer, source.wanted)
    reference = parse_reference(source.place)
    credentials = access.credentials
    if credentials is None:
        credentials = read_credentials(reference.host, access.login_file.expanduser())
    registry = Registry(
        reference,
        writer.store.local.partial,
        credentials=credentials,
        mirrors=access.mirrors,
        plain_http=access.plain_http,
    )
    return import_manifest(registry, registry.manifest(), writer)
