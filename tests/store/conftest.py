import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nagara.store.local import ObjectFolder
from nagara.store.store import Store
from nagara.store.tier import Tier
from nagara.testing.origin import Origin, running_origin

StoreMaker = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[StoreMaker]:
    """Stores over folders below the test's own; closed afterwards."""
    closing: list[Store | ObjectFolder] = []

    def make(
        *tiers: Tier,
        folder: str = "store",
        limit: int | None = None,
        tenant: str = "default",
        time_limit_s: float = 20.0,
    ) -> Store:
        objects = ObjectFolder(tmp_path / folder, limit)
        store = Store(objects.tenant(tenant), tiers, time_limit_s=time_limit_s)
        closing.extend((objects, store))
        return store

    yield make
    for thing in reversed(closing):
        thing.close()


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[Origin]:
    root = tmp_path / "origin"
    root.mkdir()
    with running_origin(root) as running:
        yield running


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What it takes to reach the bucket `objects` of a running OpenStack Swift."""
    python = "/usr/bin/python3"  # the distribution's: it has the package
    probe = [python, "-c", "import swift, eventlet"]
    if not Path(python).exists() or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs OpenStack Swift (apt-get install python3-swift)")
    pytest.importorskip("obstore")
    folder = tmp_path_factory.mktemp("swift")
    program = Path(__file__).with_name("swift_server.py")
    with subprocess.Popen(
        [python, str(program), str(folder), "objects"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield {
                "endpoint": f"http://127.0.0.1:{int(process.stdout.readline())}",
                "region": "us-east-1",
                "access_key_id": "nagara:tester",
                "secret_access_key": "testing",
            }
        finally:
            process.kill()
