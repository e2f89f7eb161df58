"""Against moto's server: a fake of the service's interface, but a real HTTP server and client."""

import importlib.util
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from nagara.store.errors import AbsentError, UnavailableError
from nagara.store.moving import push
from nagara.store.names import name_bytes
from nagara.store.retrying import RetryPolicy
from nagara.store.roots import Root, put_list, write_root
from nagara.store.s3_tier import S3Tier
from nagara.store.store import Store
from nagara.testing.objects import chunk_list, noise

StoreMaker = Callable[..., Store]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None,
    reason="needs obstore and moto",
)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{address}/moto-api/data.json", timeout=1).read()
                break
            except OSError:
                time.sleep(0.1)
        request = urllib.request.Request(f"{address}/objects", method="PUT")
        urllib.request.urlopen(request, timeout=10).read()
        yield address
    finally:
        process.kill()
        process.wait()


def tier_of(endpoint: str, tenant: str = "default", bucket: str = "s3://objects/prefix") -> S3Tier:
    options = {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "a",
        "secret_access_key": "b",
    }
    return S3Tier(bucket, tenant, options=options, retries=RetryPolicy(2, sleep=lambda _: None))


def soon() -> float:
    return time.monotonic() + 20


def test_keys_come_and_go(endpoint: str) -> None:
    tier = tier_of(endpoint)
    name = name_bytes(b"content")
    assert not tier.has(name.key, soon())
    with pytest.raises(AbsentError):
        tier.read(name.key, 0, 7, soon())
    tier.write(name.key, b"content", soon())
    assert tier.has(name.key, soon())
    assert tier.read(name.key, 2, 3, soon()) == b"nte"
    assert tier.read_all(name.key, 100, soon()) == b"content"
    assert [(e.key, e.size_bytes) for e in tier.entries("sha256", soon())] == [(name.key, 7)]
    assert list(tier_of(endpoint, "another").entries("sha256", soon())) == []
    tier.delete(name.key, soon())
    tier.delete(name.key, soon())
    assert not tier.has(name.key, soon())


def test_objects_small_and_large_come_from_a_bucket(endpoint: str, make_store: StoreMaker) -> None:
    here = make_store(folder="here")
    contents = [b"small", noise((64 << 20) + 7)]
    names = [here.put_bytes(content) for content in contents]
    root = Root("images", "x", (put_list(here, names),), {})
    write_root(here.local, root)
    push(here, tier_of(endpoint), root)
    raw = tier_of(endpoint).read_all(names[1].list_key, 1 << 20, soon())
    assert raw == chunk_list(contents[1]).to_bytes()
    there = make_store(tier_of(endpoint), folder="there")
    for name, content in zip(names, contents, strict=True):
        there.ensure(name)
        assert there.local.path(name).read_bytes() == content


def test_an_endpoint_that_is_down_is_unavailable_not_absent() -> None:
    tier = tier_of("http://127.0.0.1:9")
    with pytest.raises(UnavailableError):
        tier.read(name_bytes(b"x").key, 0, 1, soon())
