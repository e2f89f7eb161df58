"""The commands image, store and cache, as a person calls them."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a").write_bytes(b"a" * 10_000)
    (folder / "b").write_text("small")
    return folder


def nagara(state: Path, *words: str | Path, ok: bool = True) -> subprocess.CompletedProcess[str]:
    script = "from nagara.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, "--state", str(state), *map(str, words)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode == 0) == ok, done.stderr
    return done


def test_an_image_comes_is_compared_verified_and_goes(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = json.loads(
        nagara(state, "image", "import", f"dir:{source}", "--name", "one", "--json").stdout
    )
    assert (first["files"], first["objects"], first["new_bytes"]) == (3, 1, 10_000)
    (source / "c").write_bytes(b"c" * 5000)
    (source / "b").unlink()
    second = nagara(state, "image", "import", f"dir:{source}", "--name", "two")
    assert "5 kB new, 10 kB were there already" in second.stdout
    changes = nagara(state, "image", "diff", "one", "two").stdout.splitlines()
    assert changes == ["- b", "+ c"]
    assert [each["name"] for each in json.loads(nagara(state, "image", "ls", "--json").stdout)] == [
        "one",
        "two",
    ]
    assert "10000 a" in nagara(state, "image", "show", "one", "--tree").stdout
    assert "0 wrong" in nagara(state, "image", "verify", "one").stdout
    nagara(state, "image", "rm", "one")
    assert "no image named 'one'" in nagara(state, "image", "show", "one", ok=False).stderr
    assert nagara(state, "store", "ls").stdout == "images/two\n"
    assert "2 objects removed" in nagara(state, "store", "gc", "--grace", "0s").stdout
    assert json.loads(nagara(state, "store", "stat", "--json").stdout)["tenants"]["default"][
        "objects"
    ] == 4  # fmt: skip


def test_a_flipped_byte_is_found_and_named(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    nagara(state, "image", "import", f"dir:{source}", "--name", "one")
    (victim,) = (state / "store/tenants/default/sha256").glob("*.10000")
    victim.chmod(0o644)
    victim.write_bytes(b"b" * 10_000)
    done = nagara(state, "store", "verify", ok=False)
    assert victim.name in done.stdout
    assert not victim.exists()


def test_images_move_through_a_cache_server(source: Path, tmp_path: Path) -> None:
    state, other, tokens = tmp_path / "state", tmp_path / "other", tmp_path / "tokens"
    tokens.write_text(json.dumps({"a-token-of-the-zone": {"tenant": "default", "write": True}}))
    tokens.chmod(0o600)
    token = tmp_path / "token"
    token.write_text("a-token-of-the-zone")
    script = "from nagara.cli.main import main; main()"
    server = subprocess.Popen(
        [sys.executable, "-c", script, "--state", str(tmp_path / "zone"), "cache", "serve",
         "--port", "0", "--tokens", str(tokens)], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        assert urllib.request.urlopen(f"{url}/healthz", timeout=10).read() == b"ok\n"
        tier = {"kind": "http", "name": "zone", "url": url, "token_file": str(token)}
        for each in (state, other):
            (each / "store").mkdir(parents=True)
            (each / "store/settings.json").write_text(json.dumps({"tiers": [tier]}))
        nagara(state, "image", "import", f"dir:{source}", "--name", "one")
        assert (
            "3 of 3 objects moved"
            in nagara(state, "store", "push", "images/one", "--to", "zone").stdout
        )
        assert (
            "0 of 3 objects moved"
            in nagara(state, "store", "push", "images/one", "--to", "zone").stdout
        )
        assert "of 3 objects moved" in nagara(other, "store", "pull", "images/one").stdout
        assert "0 not here, 0 wrong" in nagara(other, "image", "verify", "one").stdout
        assert (
            "(known: zone)"
            in nagara(state, "store", "push", "images/one", "--to", "x", ok=False).stderr
        )
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        server.stdout.close()


def test_a_cache_that_others_can_reach_needs_tokens(tmp_path: Path) -> None:
    done = nagara(tmp_path, "cache", "serve", "--host", "0.0.0.0", ok=False)
    assert "--tokens is needed" in done.stderr


@pytest.mark.root
def test_an_image_is_mounted_and_unmounted(source: Path, tmp_path: Path) -> None:
    state, target = tmp_path / "state", tmp_path / "mnt"
    nagara(state, "image", "import", f"dir:{source}", "--name", "one")
    try:
        said = nagara(state, "image", "mount", "one", target, "--upper", tmp_path / "upper").stdout
        assert said.endswith("local\n")
        assert (target / "a").read_bytes() == b"a" * 10_000
        (target / "new").write_text("x")
        nagara(state, "image", "umount", target)
        assert (tmp_path / "upper/new").read_text() == "x"
        assert list(target.iterdir()) == []
        assert json.loads(nagara(state, "store", "stat", "--json").stdout)["pins"] == []
        nagara(state, "image", "umount", target, ok=False)
    finally:
        subprocess.run(["umount", "-l", str(target)], capture_output=True)
        _end_keeper(state / "node/keeper.sock")


def _end_keeper(path: Path) -> None:

    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as client:
        folder = os.open(path.parent, os.O_PATH)
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        client.sendall(b'{"op": "shutdown"}\n')
        client.recv(100)


def test_scrub_reads_everything_and_names_what_it_removed(source: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    nagara(state, "image", "import", f"dir:{source}", "--name", "x")
    assert ", 0 wrong" in nagara(state, "store", "scrub", "--once", "--within", "1s").stdout
    (rotten,) = (
        path
        for path in (state / "store/tenants/default/sha256").iterdir()
        if path.read_bytes() == b"a" * 10_000
    )
    rotten.chmod(0o644)
    rotten.write_bytes(b"b" * 10_000)
    said = nagara(state, "store", "scrub", "--once", "--within", "1s").stdout
    assert ", 1 wrong" in said
    assert f"removed: {rotten.name}" in said
    assert not rotten.exists()
