"""Time passing: folding, streams, captures, on a clock that the test moves."""

import asyncio
from typing import Any

import pytest

from nagara.contract.replica import ReplicaUsage
from nagara.testing.clock import JumpingClock


@pytest.fixture
def clock() -> JumpingClock:
    return JumpingClock()


async def test_an_idle_app_is_folded_after_its_keep_alive(stand: Any, text: Any) -> None:
    await stand.up(text(scale='{idle = "30s"}'))
    await stand.get("/smol/health")
    await stand.clock.advance(29)
    assert len(stand.node.live) == 1
    await stand.clock.advance(3)
    assert len(stand.node.live) == 0


async def test_a_stream_of_a_minute_is_not_cut_by_scaling_in(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale='{max = 3, concurrency = 1, idle = "5s"}'))
    streams = [asyncio.create_task(stand.get("/smol/sse?events=61")) for _ in range(3)]
    await until(lambda: bool(stand.node.live))
    for _ in range(5):
        await stand.clock.advance(1)
    await until(lambda: [r.running for r in stand.node.live.values()] == [1, 1, 1])
    *short, long = list(stand.node.live.values())
    for replica in short:
        for _ in range(61):
            replica.next_event()
    await until(lambda: [replica.running for replica in short] == [0, 0])
    for _ in range(61):
        await stand.clock.advance(2)
        long.next_event()
    results = await asyncio.gather(*streams)
    assert [(status, body.count(b"data:")) for status, body in results] == [(200, 61)] * 3
    (stopped,) = stand.node.stopped  # a second one stays: 1 request is above 70 % of one credit
    assert stopped in {replica.order.replica for replica in short}


async def test_the_wall_clock_may_jump_without_effect(stand: Any, text: Any) -> None:
    await stand.up(text(scale='{idle = "30s"}'))
    await stand.get("/smol/health")
    for jump_s in (3600, -7200):
        stand.clock.jump_wall(jump_s)
        await stand.clock.advance(2)
        assert len(stand.node.live) == 1
    assert (await stand.get("/smol/health"))[0] == 200


async def test_scale_out_follows_held_requests_and_goes_back_slowly(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale='{max = 4, concurrency = 1, idle = "10s"}'))
    stand.node.scripts["smol"].plain_s = 3.0
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(4)]

    async def are_held() -> bool:
        return bool((await stand.app())["held"] == 4)

    await until(are_held)

    async def are_ready() -> bool:
        await stand.clock.advance(1)
        return len(stand.node.live) == 4

    await until(are_ready)
    for replica in list(stand.node.live.values()):
        replica.let_go()
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}
    await stand.clock.advance(50)
    assert len(stand.node.live) == 4  # panic: nothing goes for a minute
    await stand.clock.advance(120)
    await until(lambda: not stand.node.live)


async def test_a_failing_app_is_tried_again_ever_more_seldom(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].always_fails = "broken"
    await stand.up(text(scale="{min = 1}"))
    for _ in range(8):
        await stand.clock.advance(30)
    failures = (await stand.app())["failures"]
    assert 7 <= failures <= 10
    stand.node.scripts["smol"].always_fails = None
    await stand.clock.advance(61)
    assert (await stand.get("/smol/health"))[0] == 200
    await stand.clock.advance(31)
    assert (await stand.app())["failures"] == 0


async def test_a_replica_that_ended_unseen_is_found(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(scale="{min = 1}"))
    await stand.clock.advance(2)
    (name,) = stand.node.live
    await stand.node.exit_replica(name, 9, is_seen=False)
    await stand.clock.advance(31)
    await stand.clock.advance(2)
    await until(lambda: len(stand.node.live) == 1 and name not in stand.node.live)


async def test_a_folded_app_stays_at_zero_until_it_is_called(stand: Any, text: Any) -> None:
    await stand.up(text(scale="{concurrency = 1}"))
    await asyncio.gather(*(stand.get("/smol/health") for _ in range(8)))
    await stand.admin("POST", "/api/apps/smol/fold")
    started = len(stand.node.started)
    await stand.clock.advance(20)
    assert len(stand.node.started) == started


async def test_apps_that_share_a_slot_do_not_take_it_from_each_other_unasked(
    stand: Any, text: Any
) -> None:
    await stand.up(text("one"), text("two"), text("three", scale="{min = 1}"), slots=1)
    for name in ("one", "two"):
        assert (await stand.get(f"/{name}/health"))[0] == 200
    started = len(stand.node.started)
    await stand.clock.advance(30)
    assert len(stand.node.started) == started
    assert [replica.order.spec.app for replica in stand.node.live.values()] == ["two"]


class TestCaptures:
    async def test_what_the_machine_lacks_is_said_when_an_app_is_deployed(
        self, stand: Any, text: Any
    ) -> None:
        stand.node.missing = ("criu 3.17 is too old: nagara needs 4.2",)
        await stand.up()
        (app,) = await stand.deploy(text())
        assert app["capture"]["state"] == "off"
        assert "cannot save replicas: criu 3.17 is too old" in app["capture"]["reason"]
        (app,) = await stand.deploy(text(snapshot="false"))
        assert "reason" not in app["capture"]

    async def test_a_plain_start_is_followed_by_a_capture_then_restored(
        self, stand: Any, text: Any, until: Any
    ) -> None:
        stand.node.scripts["smol"].can_snapshot = True
        await stand.up(text())
        await stand.get("/smol/health")
        assert (await stand.app())["capture"]["state"] == "wanted"
        await stand.clock.advance(1)

        async def is_done() -> bool:
            return bool((await stand.app())["capture"]["state"] == "done")

        await until(is_done)
        assert (await stand.app())["capture"]["snapshot"] == "fake-snapshot"
        await stand.admin("POST", "/api/apps/smol/fold")
        await stand.get("/smol/health")
        kinds = [start["kind"] for start in await stand.starts("smol", 2)]
        assert kinds == ["restored", "plain"]
        assert len(stand.node.captured) == 1

    async def test_many_plain_starts_at_once_are_followed_by_one_capture(
        self, stand: Any, text: Any
    ) -> None:
        script = stand.node.scripts["smol"]
        script.can_snapshot, script.capture_s = True, 3
        await stand.up(text(scale="{min = 4, max = 4}"), slots=8)
        await stand.clock.advance(3)
        starts = await stand.starts("smol", 4)
        assert [start["kind"] for start in starts] == ["plain"] * 4
        await stand.clock.advance(30)
        assert (await stand.app())["capture"]["state"] == "done"
        assert len(stand.node.captured) == 1

    async def test_a_capture_gives_its_slot_to_a_request_and_is_tried_again(
        self, stand: Any, text: Any, until: Any
    ) -> None:
        script = stand.node.scripts["smol"]
        script.can_snapshot, script.capture_s = True, 10
        await stand.up(text(), text("other"), slots=2)
        await stand.get("/smol/health")
        await stand.clock.advance(2)
        assert (await stand.app())["capture"]["state"] == "running"
        assert (await stand.get("/other/health"))[0] == 200
        assert len(stand.node.cancelled) == 1
        assert (await stand.app())["capture"]["state"] == "wanted"
        await stand.clock.advance(5)
        assert (await stand.app())["capture"]["state"] == "wanted"  # no slot is spare
        await stand.admin("POST", "/api/apps/other/fold")
        await stand.clock.advance(20)

        async def is_done() -> bool:
            return bool((await stand.app())["capture"]["state"] == "done")

        await until(is_done)

    async def test_after_two_failures_captures_are_off_until_the_next_deployment(
        self, stand: Any, text: Any
    ) -> None:
        script = stand.node.scripts["smol"]
        script.can_snapshot = True
        script.capture_failures = ["canary differs", "canary differs", "canary differs"]
        await stand.up(text(scale="{min = 1}"))
        await stand.clock.advance(10)
        capture = (await stand.app())["capture"]
        assert capture["state"] == "off"
        assert (capture["failures"], capture["reason"]) == (2, "canary differs")
        assert script.capture_failures == ["canary differs"]
        await stand.down(keep=True)
        await stand.up()
        assert (await stand.app())["capture"]["state"] == "off"
        script.capture_failures = []
        await stand.deploy(text(scale="{min = 1}"))
        await stand.admin("POST", "/api/apps/smol/fold")
        await stand.clock.advance(5)
        assert (await stand.app())["capture"]["state"] == "done"

    async def test_an_app_without_snapshots_gets_none(self, stand: Any, text: Any) -> None:
        stand.node.scripts["smol"].can_snapshot = True
        await stand.up(text(snapshot="false"))
        await stand.get("/smol/health")
        await stand.clock.advance(5)
        assert stand.node.captured == []
        assert (await stand.app())["capture"]["state"] == "off"

    async def test_deleting_and_stopping_end_a_running_capture(self, stand: Any, text: Any) -> None:
        for name in ("one", "two"):
            script = stand.node.scripts[name]
            script.can_snapshot, script.capture_s = True, 1000
        await stand.up(text("one"), text("two"))
        await stand.get("/one/health")
        await stand.clock.advance(2)
        await stand.admin("DELETE", "/api/apps/one")
        assert len(stand.node.cancelled) == 1
        await stand.get("/two/health")
        await stand.clock.advance(2)
        await stand.down()
        assert len(stand.node.cancelled) == 2
        assert stand.node.captured == []


async def test_held_requests_get_replicas_at_once_and_not_only_at_the_next_tick(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale="{max = 3, concurrency = 2}"), slots=8)
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(8)]
    await until(lambda: len(stand.node.live) == 3)  # its clock stands still: no tick has come
    for replica in list(stand.node.live.values()):
        replica.let_go()
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}


async def test_without_a_slot_held_requests_ask_for_more_only_now_and_then(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale="{max = 9, concurrency = 1}"), slots=1)
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(20)]

    async def are_held() -> bool:
        return bool((await stand.app())["held"] == 19)

    await until(are_held)
    pool = await stand.admin("GET", "/api/pool")
    assert pool["leased"] == 1
    stand.replica().let_go()
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}


async def test_a_replica_near_what_it_may_use_gets_one_more_beside_it(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale='{max = 3, concurrency = 8, idle = "60s"}'))
    request = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: bool(stand.node.live))
    await until(lambda: stand.replica().running == 1)
    name = stand.replica().order.replica
    for at_s in range(60):
        usage = ReplicaUsage(name, float(at_s), at_s * 1.9, 2.0, 10, 100)
        stand.node.usages = [usage]
        await stand.clock.advance(1)
    assert len(stand.node.live) == 2
    assert '"cpu"' in str(await _metrics(stand)).replace("'", '"')
    stand.node.live[name].let_go()
    assert (await request)[0] == 200


async def _metrics(stand: Any) -> list[str]:
    token = (stand.folder / "admin.token").read_text().strip()
    async with stand.client.get("/metrics", headers={"Authorization": f"Bearer {token}"}) as said:
        return [line for line in (await said.text()).splitlines() if "nagara_use_ratio" in line]


async def test_a_replica_that_its_machine_has_ended_is_replaced_and_the_reason_is_told(
    stand: Any, text: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    name = stand.replica().order.replica
    await stand.node.exit_replica(name, -9, reason="it wrote 2 GB to its own layer")
    assert (await stand.get("/smol/health"))[0] == 200
    assert stand.replica().order.replica != name
    assert f"{name}: was ended: it wrote 2 GB to its own layer" in caplog.text
