"""A small image as others publish them; its upper layer deletes what the lower one brought."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = {"architecture": "amd64", "os": "linux", "config": {"Env": ["A=b"], "Cmd": ["run"]}}
LAYER_KIND = "application/vnd.oci.image.layer.v1.tar+gzip"
MANIFEST_KIND = "application/vnd.oci.image.manifest.v1+json"
EXPECTED = {"etc/os": b"below", "etc/new": b"above"}


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """An archive of plain files."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return raw.getvalue()


LAYERS = (
    tar_of({"etc/os": b"below", "gone": b"x"}),
    tar_of({".wh.gone": b"", "etc/new": b"above"}),
)


def digest(raw: bytes) -> str:
    """As OCI writes it."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def blobs_of(
    layers: Sequence[bytes] = LAYERS, config: Mapping[str, Any] = CONFIG
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Digest → blob, and the manifest's descriptor."""
    packed = [gzip.compress(raw, 1, mtime=0) for raw in layers]
    described = json.dumps(
        {**config, "rootfs": {"type": "layers", "diff_ids": [digest(raw) for raw in layers]}}
    ).encode()
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_KIND,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(described), "size": len(described),
            },
            "layers": [
                {"mediaType": LAYER_KIND, "digest": digest(raw), "size": len(raw)} for raw in packed
            ],
        }
    ).encode()  # fmt: skip
    blobs = {digest(raw): raw for raw in (*packed, described, manifest)}
    place = {"mediaType": MANIFEST_KIND, "digest": digest(manifest), "size": len(manifest)}
    return blobs, place


def write_layout(
    folder: Path, layers: Sequence[bytes] = LAYERS, config: Mapping[str, Any] = CONFIG
) -> Path:
    """The image as an OCI layout in a new folder, tagged v1; returns the folder."""
    blobs, manifest = blobs_of(layers, config)
    (folder / "blobs/sha256").mkdir(parents=True)
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    manifest["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    for name, raw in blobs.items():
        (folder / "blobs" / name.replace(":", "/")).write_bytes(raw)
    return folder


def write_docker_archive(
    path: Path, layers: Sequence[bytes] = LAYERS, config: Mapping[str, Any] = CONFIG
) -> Path:
    """The image as `docker save` writes it, tagged app:1; returns the path."""
    whole = {**config, "rootfs": {"diff_ids": [digest(raw) for raw in layers]}}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "c.json", "RepoTags": ["app:1"], "Layers": names}]
    documents = {"manifest.json": manifest, "c.json": whole}
    files = {name: json.dumps(document).encode() for name, document in documents.items()}
    path.write_bytes(tar_of({**files, **dict(zip(names, layers, strict=True))}))
    return path
