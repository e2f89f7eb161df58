"""Whatever a document from outside says: it is read, or refused with an error of ours."""

import contextlib
import copy
import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nagara.base.errors import NagaraError
from nagara.image.content_writer import ContentWriter
from nagara.image.errors import BadArchiveError, BadTraceError
from nagara.image.images import image_from
from nagara.image.oci import OciLayout, import_docker_archive, import_manifest, parse_document
from nagara.image.trace import Pack, Trace, read_trace, write_trace
from nagara.store.errors import CorruptError
from nagara.store.names import ObjectName
from nagara.store.roots import parse_root
from nagara.store.store import Store
from nagara.testing.image_layouts import (
    CONFIG,
    LAYERS,
    blobs_of,
    digest,
    tar_of,
    write_layout,
)

DEEP = b"[" * 200_000 + b"]" * 200_000
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["sha256:" + "0" * 64, "\ud800", "", 1 << 70, -1, 1e400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                max_size=3),
    max_leaves=6,
)  # fmt: skip
OFTEN = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    keys = document.keys() if isinstance(document, dict) else range(len(document))
    for key in list(keys):
        yield document, key
        if isinstance(document[key], dict | list):
            yield from places(document[key])


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A document with something else, or nothing, in a few places."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 2))):
        found = list(places(document))
        if not found:
            break
        container, key = draw(st.sampled_from(found))
        if draw(st.integers(0, 3)) == 0:
            del container[key]
        else:
            container[key] = draw(JSON)
    return document


def packed(document: Any) -> bytes:
    return json.dumps(document).encode()


BLOBS, DESCRIBED = blobs_of()
MANIFEST = json.loads(BLOBS[DESCRIBED["digest"]])
IMAGE_CONFIG = json.loads(BLOBS[MANIFEST["config"]["digest"]])


def read_layout(store: Store, folder: Path, index: Any) -> None:
    (folder / "index.json").write_bytes(packed(index))
    layout = OciLayout(folder)
    with ContentWriter(store) as writer:
        import_manifest(layout, layout.manifest(None), writer)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    return write_layout(tmp_path / "layout")


def put_blob(layout: Path, raw: bytes) -> dict[str, Any]:
    (layout / "blobs" / digest(raw).replace(":", "/")).write_bytes(raw)
    return {"digest": digest(raw), "size": len(raw)}


@OFTEN
@given(changed({"schemaVersion": 2, "manifests": [DESCRIBED]}))
def test_an_index_of_a_layout(store: Store, layout: Path, index: Any) -> None:
    with contextlib.suppress(NagaraError):
        read_layout(store, layout, index)


@OFTEN
@given(changed(MANIFEST))
def test_a_manifest(store: Store, layout: Path, manifest: Any) -> None:
    with contextlib.suppress(NagaraError):
        read_layout(store, layout, {"manifests": [put_blob(layout, packed(manifest))]})


@OFTEN
@given(changed(IMAGE_CONFIG))
def test_a_configuration(store: Store, layout: Path, config: Any) -> None:
    manifest = {**MANIFEST, "config": put_blob(layout, packed(config))}
    with contextlib.suppress(NagaraError):
        read_layout(store, layout, {"manifests": [put_blob(layout, packed(manifest))]})


ENTRIES = [{"Config": "c.json", "RepoTags": ["app:1"], "Layers": ["0.tar", "1.tar"]}]


def docker_archive(path: Path, manifest: bytes, config: bytes) -> Path:
    files = {"manifest.json": manifest, "c.json": config, "0.tar": LAYERS[0], "1.tar": LAYERS[1]}
    path.write_bytes(tar_of(files))
    return path


@OFTEN
@given(changed(ENTRIES), changed(IMAGE_CONFIG) | st.just(IMAGE_CONFIG))
def test_a_docker_archive(store: Store, tmp_path: Path, entries: Any, config: Any) -> None:
    path = docker_archive(tmp_path / "archive", packed(entries), packed(config))
    with contextlib.suppress(NagaraError), ContentWriter(store) as writer:
        import_docker_archive(path, writer, "app:1")


def test_documents_that_end_the_parsers_stack(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BadArchiveError):
        parse_document(DEEP)
    with pytest.raises(BadTraceError):
        read_trace(DEEP)
    with pytest.raises(CorruptError):
        parse_root("images", "x", DEEP)
    for manifest, config in ((DEEP, packed(CONFIG)), (packed(ENTRIES), DEEP)):
        path = docker_archive(tmp_path / "archive", manifest, config)
        with ContentWriter(store) as writer, pytest.raises(BadArchiveError):
            import_docker_archive(path, writer)


def test_a_member_of_a_docker_archive_that_links_to_itself(store: Store, tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, target in (("manifest.json", "other"), ("other", "manifest.json")):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    (tmp_path / "archive").write_bytes(raw.getvalue())
    with ContentWriter(store) as writer, pytest.raises(BadArchiveError):
        import_docker_archive(tmp_path / "archive", writer)


@pytest.mark.parametrize("at", [20, 100, -20])
def test_a_layer_whose_xz_stream_is_damaged(store: Store, layout: Path, at: int) -> None:
    raw = bytearray(lzma.compress(LAYERS[0]))
    raw[at] ^= 0xFF
    config = {**IMAGE_CONFIG, "rootfs": {"diff_ids": [digest(LAYERS[0])]}}
    layer = {**put_blob(layout, bytes(raw)), "mediaType": MANIFEST["layers"][0]["mediaType"]}
    manifest = {"config": put_blob(layout, packed(config)), "layers": [layer]}
    with pytest.raises(BadArchiveError):
        read_layout(store, layout, {"manifests": [put_blob(layout, packed(manifest))]})


SMALL = ObjectName(bytes(range(32)), 5000)
LARGE = ObjectName(bytes(range(1, 33)), 100 << 20)
PACK = Pack(ObjectName(bytes(range(2, 34)), 9000), ((SMALL, 10),))
TRACE = Trace(((SMALL, ()), (LARGE, (0, 3))), (PACK,))


@OFTEN
@given(changed(json.loads(write_trace(TRACE))))
def test_a_trace(document: Any) -> None:
    try:
        found = read_trace(packed(document))
    except BadTraceError:
        return
    # What is accepted is a trace: it means the same when it is written and read again.
    assert read_trace(write_trace(found)) == found
    for name, chunks in found.objects:
        assert not chunks or max(chunks) < name.chunk_count
    for pack in found.packs:
        assert all(0 <= at <= pack.name.size - member.size for member, at in pack.members)


@OFTEN
@given(
    st.binary(max_size=300) | st.text(alphabet='{}[]":,0123456789enulversiobjctpak', max_size=80)
)
def test_no_trace_at_all(raw: bytes | str) -> None:
    with pytest.raises(BadTraceError):
        read_trace(raw if isinstance(raw, bytes) else raw.encode())


ROOT = {
    "version": 1, "name": "x", "lists": [str(SMALL)], "index": str(LARGE), "source": "dir:/x",
    "files": 3, "size_bytes": 9, "is_layer": False, "trace": None, "starts": 0,
    "config": {"Env": ["A=b"]}, "source_state": None,
}  # fmt: skip


@OFTEN
@given(changed(ROOT))
def test_the_root_of_an_image(document: Any) -> None:
    try:
        image_from(parse_root("images", "x", packed(document)))
    except CorruptError:
        return
