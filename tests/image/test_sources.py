import base64
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registries import PROGRAM, push_image, running_registry

from nagara.base.errors import UsageError
from nagara.image.errors import BadArchiveError, ImageError, SourceError
from nagara.image.images import load_tree
from nagara.image.models import ModelError
from nagara.image.registry import Credentials, parse_reference
from nagara.image.sources import RegistryAccess, import_image, parse_source
from nagara.image.tree import walk
from nagara.store.roots import read_list
from nagara.store.store import Store
from nagara.testing.image_layouts import (
    EXPECTED,
    LAYERS,
    blobs_of,
    tar_of,
    write_docker_archive,
    write_layout,
)
from nagara.testing.objects import noise


def contents(store: Store, text: str, access: RegistryAccess | None = None) -> dict[str, Any]:
    added, _ = import_image(store, text, "image", access)
    assert dict(added.image.config or {}) == {"Env": ["A=b"], "Cmd": ["run"]}
    tree = load_tree(store, added.image)
    return {path.decode(): node.inline for path, node in walk(tree) if not node.is_folder}


def test_an_oci_layout(store: Store, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout")
    assert contents(store, f"oci:{layout}") == EXPECTED
    assert contents(store, f"oci:{layout}:v1") == EXPECTED
    with pytest.raises(BadArchiveError, match="named v2"):
        import_image(store, f"oci:{layout}:v2", "image")


def test_an_image_that_is_known_is_not_read_again(store: Store, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout")
    first, _ = import_image(store, f"oci:{layout}", "first")
    for layer in blobs_of(LAYERS)[0]:
        path = layout / "blobs" / layer.replace(":", "/")
        if path.read_bytes()[:2] == b"\x1f\x8b":  # a layer: it would be missed
            path.unlink()
    again, _ = import_image(store, f"oci:{layout}", "again")
    assert again.image.index == first.image.index
    assert (again.image.name, again.image.config) == ("again", first.image.config)
    assert again.new_bytes == 0


def test_an_image_that_is_known_but_not_all_here_is_read_again(
    store: Store, tmp_path: Path
) -> None:
    layout = write_layout(tmp_path / "layout", [tar_of({"large": noise(5000)})])
    first, _ = import_image(store, f"oci:{layout}", "first")
    for name in read_list(store, first.image.list):
        if name.size == 5000:
            store.local.discard(name)
    again, _ = import_image(store, f"oci:{layout}", "again")
    assert again.new_bytes == 5000
    assert again.image.index == first.image.index


def test_a_blob_that_is_not_what_its_digest_says_is_refused(store: Store, tmp_path: Path) -> None:
    for number, victim in enumerate(sorted(blobs_of(LAYERS)[0])):
        layout = write_layout(tmp_path / str(number))
        path = layout / "blobs" / victim.replace(":", "/")
        raw = bytearray(path.read_bytes())
        raw[-3] ^= 1
        path.write_bytes(raw)
        with pytest.raises(ImageError):
            import_image(store, f"oci:{layout}", "image")
        path.unlink()
        with pytest.raises(ImageError):
            import_image(store, f"oci:{layout}", "image")


def test_a_digest_is_no_path(store: Store, tmp_path: Path) -> None:
    layout = write_layout(tmp_path / "layout")
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0]["digest"] = "sha256:../../../etc/passwd"
    (layout / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadArchiveError):
        import_image(store, f"oci:{layout}", "image")


def test_a_docker_archive(store: Store, tmp_path: Path) -> None:
    path = write_docker_archive(tmp_path / "a:b.tar")
    assert contents(store, f"docker-archive:{path}") == EXPECTED
    assert contents(store, f"docker-archive:{path}:app:1") == EXPECTED
    with pytest.raises(BadArchiveError, match="app:2"):
        import_image(store, f"docker-archive:{path}:app:2", "image")
    path.write_bytes(path.read_bytes()[:4000])
    with pytest.raises(ImageError):
        import_image(store, f"docker-archive:{path}", "image")


@pytest.fixture(params=["open", "login"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Any]]:
    """A real registry, without and with a login; yields its host and what a client needs."""
    if shutil.which(PROGRAM) is None:
        pytest.skip("needs docker-registry (apt-get install docker-registry)")
    # What `htpasswd -Bbn user secret` printed.
    line = "user:$2y$05$Ycb8J79wHN/gAdXFOfVkceUxbWmm2/CrfqjBJkxYPy6xlgG2Bd7aa\n"
    htpasswd = line if request.param == "login" else None
    with running_registry(tmp_path, htpasswd=htpasswd) as host:
        yield host, request.param


def test_a_registry(store: Store, registry: tuple[str, str]) -> None:
    host, kind = registry
    is_login = kind == "login"
    basic = "Basic " + base64.b64encode(b"user:secret").decode()
    push_image(host, "team/app", "v1", headers={"Authorization": basic} if is_login else None)
    access = RegistryAccess(credentials=Credentials("user", "secret") if is_login else None)
    assert contents(store, f"registry:{host}/team/app:v1", access) == EXPECTED
    mirrored = RegistryAccess(mirrors=(host,), credentials=access.credentials)
    assert contents(store, "registry:127.0.0.1:9/team/app:v1", mirrored) == EXPECTED
    with pytest.raises(SourceError):
        import_image(store, f"registry:{host}/team/app:none", "image", access)
    if is_login:
        with pytest.raises(SourceError):
            import_image(store, f"registry:{host}/team/app:v1", "image", RegistryAccess())


def test_a_token_server_is_asked_and_blobs_may_be_elsewhere(store: Store, tmp_path: Path) -> None:
    """A registry with bearer tokens, redirects and a connection that breaks once."""
    script = Path(__file__).parent / "token_registry.py"
    blobs, manifest = blobs_of(LAYERS)
    for name, raw in blobs.items():
        (tmp_path / name.replace(":", "-")).write_bytes(raw)
    (tmp_path / "manifest").write_text(manifest["digest"].replace(":", "-"))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        port = int(process.stdout.readline())
        access = RegistryAccess(credentials=Credentials("user", "secret"))
        assert contents(store, f"registry:127.0.0.1:{port}/team/app:v1", access) == EXPECTED
        log = urllib.request.urlopen(f"http://127.0.0.1:{port}/log").read().decode().split("\n")
        assert "leaked" not in log
        assert "resumed" in log
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("text", ["", "x", "ftp:x", "dir:", "registry:app", "registry:H/UPPER"])
def test_other_sources_are_refused(store: Store, text: str) -> None:
    with pytest.raises(UsageError):
        import_image(store, text, "image")


def test_references() -> None:
    reference = parse_reference("host.example:5000/a/b-c_d:v1.2@sha256:" + "a" * 64)
    assert (reference.host, reference.repository) == ("host.example:5000", "a/b-c_d")
    assert reference.wanted == "sha256:" + "a" * 64
    assert parse_reference("[::1]:5/a").wanted == "latest"
    assert parse_source("dir:a:b").place == "a:b"


@pytest.mark.slow
@pytest.mark.root
def test_a_virtual_environment_brings_its_interpreter(store: Store, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    added, missing = import_image(store, f"venv:{venv}", "image")
    assert missing == ()
    found = {path for path, _ in walk(load_tree(store, added.image))}
    wanted = os.fsencode(venv)[1:]
    assert {wanted + b"/bin/python", wanted + b"/pyvenv.cfg", b"etc/passwd", b"tmp"} <= found
    assert any(path.rpartition(b"/")[2].startswith(b"ld-linux") for path in found)
    assert any(path.endswith(b"/libc.so.6") for path in found)
    with pytest.raises(SourceError):
        import_image(store, f"venv:{tmp_path}", "image")


def test_a_model_folder_of_a_download_cache_is_the_same_image_everywhere(
    store: Store, tmp_path: Path
) -> None:
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    plain = tmp_path / "plain"
    for folder in (blobs, snapshot / "onnx", plain / "onnx", snapshot / ".git/hooks"):
        folder.mkdir(parents=True)
    (snapshot / ".git/config").write_text("not the model's")
    for name, content in [("config.json", b"{}"), ("onnx/model.bin", noise(70_000))]:
        (blobs / name.replace("/", "-")).write_bytes(content)
        (snapshot / name).symlink_to(blobs / name.replace("/", "-"))
        (plain / name).write_bytes(content)
        (plain / name).chmod(0o600)
    images = [
        import_image(store, f"model:{folder}", folder.name)[0].image for folder in (snapshot, plain)
    ]
    assert images[0].fingerprint == images[1].fingerprint
    tree = load_tree(store, images[0])
    assert [path for path, _ in walk(tree)] == [b"", b"config.json", b"onnx", b"onnx/model.bin"]
    (snapshot / "gone").symlink_to(blobs / "nothing")
    with pytest.raises(ModelError, match="link to nothing"):
        import_image(store, f"model:{snapshot}", "x")
    with pytest.raises(SourceError, match="no files"):
        import_image(store, f"model:{snapshot / '.git/hooks'}", "x")
