"""Two processes that talk through torch.distributed are saved, and talk again in every clone."""

from pathlib import Path

import pytest

from nagara.contract.replica import Canary, SnapshotHooks, StartKind

pytestmark = pytest.mark.root
PAIR = (Path(__file__).parent.parent / "apps/pair.py").read_text()


async def test_a_process_group_is_torn_down_and_built_anew(yard):
    spec = yard.spec(
        app="pair",
        command=("python", "-c", PAIR),
        env={"PAIR": PAIR},
        ready_path="/health",
        canary=Canary("/health"),
        hooks=SnapshotHooks(rebuilds_communicators=True),
        start_timeout_s=120.0,
    )
    plain = await yard.start(spec)
    assert (await yard.ask(plain.replica)).body == b"11"  # 10, and built once
    report = await yard.capture(spec)
    assert report.reason is None
    for _ in range(2):
        clone = await yard.start(spec)
        assert clone.kind is StartKind.RESTORED, clone.fallback
        answers = [(await yard.ask(clone.replica)).body for _ in range(2)]
        assert answers == [b"12", b"12"]  # built again, in both processes
