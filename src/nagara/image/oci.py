"""Images as others publish them: OCI layouts and docker archives. See registry for the network.

Specification: OCI image-spec 1.1. Every blob is checked against its digest while it is read.
Blocking; belongs to one thread.
"""

import hashlib
import io
import platform
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from nagara.image.compression import DAMAGED, HashedStream, decompressed
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadArchiveError
from nagara.image.tar_import import MALFORMED, LayeredTree
from nagara.image.tree import Node
from nagara.store.documents import parse_json

DOCUMENT_LIMIT_BYTES = 8 << 20
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPTED = (*_INDEXES, *_MANIFESTS)
_LAYER = re.compile(
    r"application/vnd\.(oci\.image\.layer(\.nondistributable)?\.v1\.tar(\+gzip|\+zstd)?"
    r"|docker\.image\.rootfs\.(diff|foreign\.diff)\.tar(\.gzip|\.zstd)?)"
)
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_CONFIG_KEYS = {
    "Env": list, "Entrypoint": list, "Cmd": list, "WorkingDir": str, "User": str,
    "ExposedPorts": dict, "Labels": dict,
}  # fmt: skip


class Blobs(Protocol):
    """Where the parts of an image come from."""

    def open_blob(self, descriptor: Mapping[str, Any]) -> Any:
        """A context manager that gives the blob's stream. Raises `BadArchiveError`."""
        ...


def import_manifest(
    blobs: Blobs, manifest: Mapping[str, Any], writer: ContentWriter
) -> tuple[Node, dict[str, Any]]:
    """The tree and the run configuration of one image manifest. Raises `BadArchiveError`."""
    config = read_document(blobs, _part(manifest, "config"))
    tree = LayeredTree(writer)
    layers = _part(manifest, "layers")
    diffs = _diff_ids(config, len(layers))
    for number, (layer, diff) in enumerate(zip(layers, diffs, strict=True)):
        kind = layer.get("mediaType", "")
        if not _LAYER.fullmatch(kind):
            raise BadArchiveError(f"layer {number} is of the unknown kind {kind!r}")
        with blobs.open_blob(layer) as stream:
            add_layer(tree, stream, layer, diff, f"layer {number}")
    return tree.root, run_config(config)


def add_layer(
    tree: LayeredTree, stream: BinaryIO, layer: Mapping[str, Any], diff: str, where: str
) -> None:
    """One layer, checked against the digest of its blob and of its content."""
    packed = HashedStream(stream, layer.get("size"))
    with decompressed(cast("BinaryIO", packed)) as plain:
        content = HashedStream(plain)
        tree.add_layer(cast("BinaryIO", io.BufferedReader(content, 1 << 18)), where)
        try:
            found = content.drain()
        except (OSError, *DAMAGED) as error:
            raise BadArchiveError(f"is cut: {error}", where=where) from error
    if found != diff:
        raise BadArchiveError("its content has another digest than the image says", where=where)
    if "digest" in layer and packed.drain() != layer["digest"]:
        raise BadArchiveError("has another digest than the image says", where=where)


def read_document(blobs: Blobs, descriptor: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON blob, checked."""
    if descriptor.get("size", 0) > DOCUMENT_LIMIT_BYTES:
        raise BadArchiveError("a document that is too large")
    with blobs.open_blob(descriptor) as stream:
        raw = stream.read(DOCUMENT_LIMIT_BYTES + 1)
    if "digest" in descriptor:
        check_digest(raw, descriptor["digest"])
    return parse_document(raw)


def parse_document(raw: bytes) -> dict[str, Any]:
    """Raises `BadArchiveError` for anything but a JSON object."""
    try:
        document = parse_json(raw)
    except ValueError as error:
        raise BadArchiveError(f"a document is no JSON: {error}"[:200]) from error
    if not isinstance(document, dict):
        raise BadArchiveError("a document is no JSON object")
    return document


def check_digest(raw: bytes, digest: str) -> None:
    """Raises `BadArchiveError` unless the bytes have that digest, of a kind we know."""
    if not _DIGEST.fullmatch(str(digest)):
        raise BadArchiveError(f"the digest {digest!r} is of no known kind")
    if "sha256:" + hashlib.sha256(raw).hexdigest() != digest:
        raise BadArchiveError("a document has another digest than its descriptor says")


def is_index(document: Mapping[str, Any]) -> bool:
    """It lists images for several platforms."""
    return document.get("mediaType") in _INDEXES or "manifests" in document


def choose(index: Mapping[str, Any], wanted: str | None = None) -> dict[str, Any]:
    """The manifest for this machine's processor, and of that tag if one is given."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    fitting = []
    for entry in _part(index, "manifests"):
        place = entry.get("platform") or {}
        tag = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        is_ours = (
            place.get("architecture", machine) == machine and place.get("os", "linux") == "linux"
        )
        if is_ours and (wanted is None or tag == wanted or entry.get("digest") == wanted):
            fitting.append(entry)
    if not fitting:
        raise BadArchiveError(
            f"has no image for linux/{machine}" + (f" named {wanted}" if wanted else "")
        )
    return cast("dict[str, Any]", fitting[0])


def run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """How the image's command is run, as its configuration says. Raises `BadArchiveError`."""
    inner = config.get("config") or {}
    if not isinstance(inner, dict):
        raise BadArchiveError("a configuration without a proper 'config'")
    found = {key: inner[key] for key in _CONFIG_KEYS if inner.get(key)}
    for key, value in found.items():
        is_proper = isinstance(value, _CONFIG_KEYS[key])
        if isinstance(value, list):
            is_proper = is_proper and all(isinstance(each, str) for each in value)
        if not is_proper:
            raise BadArchiveError(f"a configuration without a proper {key!r}")
    return found


class OciLayout:
    """A folder in the OCI layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "oci-layout").is_file():
            raise BadArchiveError(
                "is no OCI layout: the file oci-layout is missing", where=str(folder)
            )

    def manifest(self, wanted: str | None) -> dict[str, Any]:
        """The manifest of a tag or digest, or the first one for this machine."""
        document = parse_document((self._folder / "index.json").read_bytes())
        while is_index(document):
            chosen = choose(document, wanted)
            document, wanted = read_document(self, chosen), None
        return document

    @contextmanager
    def open_blob(self, descriptor: Mapping[str, Any]) -> Iterator[BinaryIO]:
        digest = str(descriptor.get("digest"))
        if not _DIGEST.fullmatch(digest):
            raise BadArchiveError(f"the digest {digest!r} is of no known kind")
        path = self._folder / "blobs" / digest.replace(":", "/")
        try:
            stream = path.open("rb")
        except OSError as error:
            raise BadArchiveError(
                f"a blob is missing: {error.strerror}", where=str(path)
            ) from error
        with stream:
            yield stream


def import_docker_archive(
    path: Path, writer: ContentWriter, wanted: str | None = None
) -> tuple[Node, dict[str, Any]]:
    """What `docker save` writes. Raises `BadArchiveError`."""
    try:
        with tarfile.open(path) as archive:
            entry = _archive_entry(archive, wanted)
            config = parse_document(_member(archive, entry["Config"]).read(DOCUMENT_LIMIT_BYTES))
            tree = LayeredTree(writer)
            diffs = _diff_ids(config, len(entry["Layers"]))
            for name, diff in zip(entry["Layers"], diffs, strict=True):
                with _member(archive, name) as stream:
                    add_layer(tree, stream, {}, diff, str(name))
    except (OSError, *MALFORMED) as error:
        raise BadArchiveError(f"is no docker archive: {error!r}"[:200], where=str(path)) from error
    return tree.root, run_config(config)


def _archive_entry(archive: tarfile.TarFile, wanted: str | None) -> dict[str, Any]:
    raw = _member(archive, "manifest.json").read(DOCUMENT_LIMIT_BYTES)
    entries = parse_json(raw)
    if not isinstance(entries, list) or not entries:
        raise BadArchiveError("its manifest.json names no image")
    for entry in entries:
        if wanted is None or wanted in (entry.get("RepoTags") or ()):
            return cast("dict[str, Any]", entry)
    raise BadArchiveError(f"has no image named {wanted}")


def _member(archive: tarfile.TarFile, name: str) -> BinaryIO:
    stream = archive.extractfile(name)
    if stream is None:
        raise BadArchiveError("a member is no file", where=name)
    return cast("BinaryIO", stream)


def _part(document: Mapping[str, Any], key: str) -> Any:
    """A descriptor (`config`) or a list of them, of the types the specification says."""
    part = document.get(key)
    parts = [part] if key == "config" else part
    if not isinstance(parts, list) or not all(map(_is_descriptor, parts)):
        raise BadArchiveError(f"a document without a proper {key!r}")
    return part


def _is_descriptor(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    size = part.get("size", 0)
    return (
        type(size) is int
        and size >= 0
        and all(isinstance(part.get(key, ""), str) for key in ("mediaType", "digest"))
        and all(isinstance(part.get(key) or {}, dict) for key in ("platform", "annotations"))
    )


def _diff_ids(config: Mapping[str, Any], layers: int) -> list[str]:
    """The digest of each layer's content."""
    system = config.get("rootfs") or {}
    diffs = (system.get("diff_ids") or []) if isinstance(system, dict) else None
    if not isinstance(diffs, list):
        raise BadArchiveError("a configuration without a proper 'rootfs'")
    if len(diffs) != layers:
        raise BadArchiveError("has another number of layers than its configuration says")
    return diffs
