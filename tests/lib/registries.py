"""A real registry (Debian's docker-registry) on this machine, and pushing an image to it."""

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nagara.testing.image_layouts import CONFIG, LAYERS, MANIFEST_KIND, blobs_of

PROGRAM = "docker-registry"


@contextmanager
def running_registry(folder: Path, *, htpasswd: str | None = None) -> Iterator[str]:
    """Its host and port; ends with the block.

    Args:
        folder: for what it keeps.
        htpasswd: lines of users who alone may enter.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    auth = ""
    if htpasswd is not None:
        (folder / "htpasswd").write_text(htpasswd)
        auth = f"auth:\n  htpasswd:\n    realm: r\n    path: {folder}/htpasswd\n"
    (folder / "config.yml").write_text(
        f"version: 0.1\nlog:\n  level: error\nstorage:\n  filesystem:\n"
        f"    rootdirectory: {folder}/registry\nhttp:\n  addr: 127.0.0.1:{port}\n{auth}"
    )
    program = shutil.which(PROGRAM)
    assert program is not None
    process = subprocess.Popen(
        [program, "serve", str(folder / "config.yml")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_until_it_answers(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def push_image(
    host: str,
    repository: str,
    tag: str,
    layers: Sequence[bytes] = LAYERS,
    config: Mapping[str, Any] = CONFIG,
    *,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Pushes an image with nothing but HTTP."""
    own = dict(headers or {})
    blobs, manifest = blobs_of(layers, config)
    base = f"http://{host}/v2/{repository}"
    for name, raw in blobs.items():
        if name == manifest["digest"]:
            continue
        request = urllib.request.Request(f"{base}/blobs/uploads/", b"", own, method="POST")
        with urllib.request.urlopen(request) as begun:
            place = begun.headers["Location"]
        place += ("&" if "?" in place else "?") + f"digest={name}"
        request = urllib.request.Request(
            place, raw, {**own, "Content-Type": "application/octet-stream"}, method="PUT"
        )
        urllib.request.urlopen(request).close()
    request = urllib.request.Request(
        f"{base}/manifests/{tag}", blobs[manifest["digest"]],
        {**own, "Content-Type": MANIFEST_KIND}, method="PUT",
    )  # fmt: skip
    urllib.request.urlopen(request).close()


def _wait_until_it_answers(port: int) -> None:
    deadline_s = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5).close()
            return
        except urllib.error.HTTPError as answered:
            answered.close()
            return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
