"""Starts, drains, failures, exits and take-over, over a fake node."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from nagara.control.control import Control
from nagara.control.errors import StateBusyError
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import a_machine


async def test_two_hundred_times_from_zero_no_request_is_lost(stand: Any, text: Any) -> None:
    await stand.up(text())
    for number in range(200):
        status, body = await stand.get(f"/smol/echo/{number}")
        assert status == 200, body
        await stand.admin("POST", "/api/apps/smol/fold")
        assert not stand.node.live
    assert len(stand.node.started) == 200


async def test_requests_while_it_folds_are_answered_by_the_next_replica(
    stand: Any, text: Any
) -> None:
    await stand.up(text())
    statuses: Counter[int] = Counter()
    is_over = False

    async def call() -> None:
        while not is_over:
            status, _ = await stand.get("/smol/health")
            statuses[status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(call())
        for _ in range(30):
            await stand.admin("POST", "/api/apps/smol/fold")
            await asyncio.sleep(0.01)
        is_over = True
    assert set(statuses) == {200}


async def test_folding_spares_the_start_that_requests_wait_for(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["smol"].plain_s = 0.3
    await stand.up(text())
    request = asyncio.create_task(stand.get("/smol/health"))

    async def is_held() -> bool:
        return bool((await stand.app())["held"])

    await until(is_held)
    while not request.done():
        await stand.admin("POST", "/api/apps/smol/fold")
    assert (await request)[0] == 200
    assert stand.node.cancelled == []


async def test_a_kept_alive_client_reaches_no_draining_replica(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    old = stand.replica()
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: old.running == 1)
    fold = asyncio.create_task(stand.admin("POST", "/api/apps/smol/fold"))

    async def is_draining() -> bool:
        return bool((await stand.app())["replicas"]["draining"])

    await until(is_draining)
    seen = len(old.requests)
    for _ in range(20):
        async with stand.client.get("/smol/echo") as answer:
            assert (await answer.json())["replica"] != old.order.replica
    assert len(old.requests) == seen
    assert not fold.done()
    old.let_go()
    status, body = await waiting
    assert (status, json.loads(body)["replica"]) == (200, old.order.replica)
    await fold
    assert old.order.replica in stand.node.stopped


async def test_eight_at_once_on_two_replicas_are_spread_by_credits(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(scale="{min = 2, max = 2, concurrency = 4}"))
    await until(lambda: len(stand.node.live) == 2)
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(9)]
    await until(lambda: sum(r.running for r in stand.node.live.values()) == 8)
    assert [replica.running for replica in stand.node.live.values()] == [4, 4]
    assert (await stand.app())["held"] == 1
    for replica in stand.node.live.values():
        replica.let_go()
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}
    assert max(replica.most_running for replica in stand.node.live.values()) == 4


async def test_a_full_queue_answers_429_at_once(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(scale="{max = 1, concurrency = 1}"))
    await stand.get("/smol/health")
    assert stand.control is not None
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(1001)]

    async def is_full() -> bool:
        return bool((await stand.app())["held"] == 1000)

    async with aiohttp.ClientSession(
        stand.url,
        headers={"Authorization": f"Bearer {stand.key}"},
    ) as client:
        await until(is_full)
        async with client.get("/smol/health") as answer:
            assert answer.status == 429
            assert answer.headers["Retry-After"] == "1"
            assert (await answer.json())["error"]["code"] == "queue_full"
    for request in requests:
        request.cancel()
    await asyncio.wait(requests)


async def test_a_held_request_that_waits_too_long_gets_503(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].plain_s = 30
    await stand.up(text(timeouts='{queue = "150ms"}'))
    async with stand.client.get("/smol/health") as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert float(answer.headers["x-nagara-queue-ms"]) >= 150
        assert (await answer.json())["error"]["code"] == "queue_timeout"


async def test_an_app_that_cannot_start_says_why_and_is_not_hammered(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].always_fails = "no such file: model"
    await stand.up(text())
    for _ in range(5):
        async with stand.client.get("/smol/health") as answer:
            message = (await answer.json())["error"]["message"]
            assert answer.status == 503
            assert "no such file: model" in message
            assert "nagara logs smol" in message
            assert "Retry-After" in answer.headers
    app = await stand.app()
    assert app["failures"] == 2
    assert app["replicas"] == {"starting": 0, "ready": 0, "draining": 0, "stopping": 0}
    starts = await stand.starts("smol", 2)
    assert [start["kind"] for start in starts] == [None, None]
    assert "no such file" in starts[0]["error"]


async def test_one_failed_start_is_repeated_while_the_request_waits(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].failures = ["bad luck"]
    await stand.up(text())
    status, _ = await stand.get("/smol/health")
    assert status == 200


async def test_a_failing_app_does_not_keep_another_from_folding(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["bad"].always_fails = "never"
    await stand.up(text("bad", scale="{min = 1}"), text("good", scale='{idle = "100ms"}'))
    await stand.get("/good/health")
    await until(lambda: not stand.node.live)


async def test_a_replica_that_ends_fails_its_requests_and_is_replaced(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    (name,) = stand.node.live
    waiting = asyncio.create_task(_post(stand, "/smol/wait"))
    await until(lambda: stand.replica().running == 1)
    await stand.node.exit_replica(name, 137)
    status, body = await waiting
    assert status == 502
    assert json.loads(body)["error"]["code"] == "replica_failed"
    status, _ = await stand.get("/smol/health")
    assert status == 200
    assert name not in stand.node.live


async def test_a_request_that_cannot_have_begun_goes_to_another_replica(
    stand: Any, text: Any
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    (name,) = stand.node.live
    await asyncio.sleep(2.1)  # the kept-alive connection is given up
    await stand.node.exit_replica(name, 1, is_seen=False)
    async with stand.client.post("/smol/upload", data=b"once") as answer:
        assert answer.status == 200
        assert answer.headers["x-nagara-replica"] != name


async def test_a_silent_replica_gives_up_its_slot_to_a_waiting_app(stand: Any, text: Any) -> None:
    await stand.up(text("one"), text("two"), slots=1)
    for name in ("one", "two", "one", "two"):
        status, _ = await stand.get(f"/{name}/health")
        assert status == 200
    assert stand.node.most_live == 1


async def test_without_a_free_slot_the_answer_is_503_at_once(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text("one"), text("two"), slots=1)
    busy = asyncio.create_task(stand.get("/one/wait"))
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    status, body = await stand.get("/two/health")
    assert status == 503
    assert json.loads(body)["error"]["code"] == "no_supply"
    stand.replica().let_go()
    assert (await busy)[0] == 200


async def test_a_deleted_app_leaves_nothing(stand: Any, text: Any) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    await stand.admin("DELETE", "/api/apps/smol")
    assert stand.node.live == {}
    assert stand.node.forgotten == [("default", "smol")]
    assert (await stand.get("/smol/health"))[0] == 404
    assert (await stand.admin("GET", "/api/apps"))["apps"] == []


async def test_a_graceful_stop_lets_requests_end_and_folds_everything(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    stand.control.stop()
    await asyncio.sleep(0.05)
    stand.replica().let_go()
    assert (await waiting)[0] == 200
    await until(lambda: not stand.node.live)
    await stand.down()
    assert not (stand.folder / "control.json").exists()


async def _post(stand: Any, path: str, **headers: str) -> tuple[int, bytes]:
    async with stand.client.post(path, data=b"{}", headers=headers) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_request_that_may_be_repeated_outlives_its_replica(
    stand: Any, text: Any, until: Any, method: str
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    asked = (
        stand.get("/smol/wait")
        if method == "GET"
        else _post(stand, "/smol/wait", **{"Idempotency-Key": "7"})
    )
    waiting = asyncio.create_task(asked)
    await until(lambda: stand.replica().running == 1)
    (first,) = stand.node.live
    await stand.node.exit_replica(first, 137)
    await until(lambda: list(stand.node.live) not in ([], [first]))
    await until(lambda: stand.replica().running == 1)
    stand.replica().let_go()
    assert (await waiting)[0] == 200


async def test_a_request_that_ends_replicas_ends_no_more_than_two(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    for _ in range(2):
        await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
        (name,) = stand.node.live
        await stand.node.exit_replica(name, 137)
    status, body = await waiting
    assert (status, json.loads(body)["error"]["code"]) == (502, "replica_failed")


async def test_a_stop_cuts_requests_that_never_end(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(), drain_s=0.1)
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    stand.control.stop()
    status, _ = await waiting
    assert status == 503  # it was to be sent again, to nobody
    await until(lambda: not stand.node.live)


async def test_a_restart_takes_running_replicas_over(
    stand: Any, text: Any, until: Any, tmp_path: Path
) -> None:
    await stand.up(text(scale="{min = 2, max = 2}"), text("other"))
    await until(lambda: len(stand.node.live) == 2)
    await stand.get("/other/health")
    before = list(stand.node.live)
    await stand.down(keep=True)
    assert list(stand.node.live) == before

    stand.node.scripts["smol"].always_fails = "no start is allowed now"
    await stand.up()
    leases = [replica.order.lease for replica in stand.node.live.values()]
    async with stand.client.get("/smol/echo") as answer:
        assert (await answer.json())["replica"] in before
    assert (await stand.app())["replicas"]["ready"] == 2
    assert (await stand.app("other"))["replicas"]["ready"] == 1
    # The one slot left is granted with a lease of its own.
    await stand.deploy(text("third"))
    assert (await stand.get("/third/health"))[0] == 200
    assert len({replica.order.lease.slot for replica in stand.node.live.values()}) == 4
    assert leases[0].slot != leases[1].slot


async def test_a_restart_in_mid_load_costs_no_replica(stand: Any, text: Any, until: Any) -> None:
    await stand.up(text(scale="{max = 2, concurrency = 2, min = 2}"))
    await until(lambda: len(stand.node.live) == 2)
    before, port = list(stand.node.live), int(stand.url.rpartition(":")[2])
    seen: Counter[object] = Counter()
    is_over = False

    async def call(client: aiohttp.ClientSession) -> None:
        while not is_over:
            try:
                async with client.get("/smol/health") as answer:
                    seen[answer.status] += 1
            except aiohttp.ClientConnectionError:
                seen["not connected"] += 1
            await asyncio.sleep(0.002)

    headers = {"Authorization": f"Bearer {stand.key}"}
    async with aiohttp.ClientSession(stand.url, headers=headers) as client:
        calls = [asyncio.create_task(call(client)) for _ in range(4)]
        await asyncio.sleep(0.2)
        await stand.down(keep=True)
        await stand.up(port=port)
        for status in (200, 502, 503):
            seen[status] = 0
        await until(lambda: seen[200] > 100)
        is_over = True
        await asyncio.gather(*calls)
    assert seen[502] == seen[503] == 0
    assert list(stand.node.live) == before
    assert stand.node.started == before


async def test_a_request_counts_once_whether_held_or_running(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["smol"].plain_s = 0.2
    await stand.up(text(scale="{max = 1, concurrency = 2}"))
    requests = [asyncio.create_task(stand.get("/smol/wait")) for _ in range(3)]

    async def counts(running: int, held: int) -> bool:
        app = await stand.app()
        assert app["running"] + app["held"] <= 3
        return bool((app["running"], app["held"]) == (running, held))

    await until(lambda: counts(0, 3))
    await until(lambda: counts(2, 1))
    stand.replica().let_go()
    await asyncio.gather(*requests)
    assert await counts(0, 0)


async def test_a_restart_ends_replicas_of_unknown_or_changed_apps(
    stand: Any, text: Any, node: FakeNode
) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    await stand.down(keep=True)
    left = next(iter(node.live.values()))
    (stand.folder / "control.db").unlink()
    await stand.up(text())
    assert node.live == {}
    assert node.stopped == [left.order.replica]


async def test_epochs_rise_over_restarts(stand: Any, text: Any) -> None:
    await stand.up(text(), slots=1)
    epochs = []
    for _ in range(2):
        await stand.get("/smol/health")
        epochs.append(stand.replica().order.lease.epoch)
        await stand.down()
        await stand.up(slots=1)
    assert epochs == [1, 2]


async def test_two_control_processes_on_one_folder_are_refused(stand: Any) -> None:
    await stand.up()
    second = Control(stand.folder, stand.node, a_machine(1))
    with pytest.raises(StateBusyError, match="another control process"):
        await second.run(lambda ready: None)
    assert (await stand.get("/healthz"))[0] == 200


async def test_the_state_is_for_its_owner_only(stand: Any, text: Any) -> None:
    await stand.up(text())
    assert stand.folder.stat().st_mode & 0o777 == 0o700
    for path in stand.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    assert stand.key not in (stand.folder / "control.db").read_bytes().decode("latin-1")


async def test_a_wrong_file_changes_nothing(stand: Any, text: Any) -> None:
    await stand.up(text())
    async with stand.client.put(
        "/api/apps?file=x.toml",
        data=text("a") + text("b", ports="1"),
        headers={"Authorization": f"Bearer {(stand.folder / 'admin.token').read_text().strip()}"},
    ) as answer:
        assert answer.status == 400
        error = (await answer.json())["error"]
    assert "app.b.ports: unknown key; nearest: port" in error["message"]
    assert error["param"] == "x.toml"
    assert [app["name"] for app in (await stand.admin("GET", "/api/apps"))["apps"]] == ["smol"]


async def test_a_start_is_recorded_with_every_stage(stand: Any, text: Any) -> None:
    stand.node.scripts["smol"].plain_s = 0.1
    await stand.up(text())
    await stand.get("/smol/health")

    (start,) = await stand.starts("smol", 1)
    stages = start["stages"]
    assert list(stages) == ["acquire", "files", "host", "device", "canary", "unaccounted"]
    assert start["kind"] == "plain"
    assert stages["device"] == 0.1
    assert sum(stages.values()) == pytest.approx(start["total_s"])
    assert await stand.starts(start["replica"], 1) == [start]


async def test_logs_of_the_newest_replica(stand: Any, text: Any) -> None:
    await stand.up(text())
    await stand.get("/smol/health")
    token = (stand.folder / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with stand.client.get("/api/apps/smol/logs", headers=headers) as answer:
        assert "GET /health" in await answer.text()
        name = answer.headers["x-nagara-replica"]
    assert [name] == list(stand.node.live)


async def test_a_node_that_is_away_for_a_moment_costs_neither_requests_nor_replicas(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text("warm"), text("cold"))
    await stand.get("/warm/health")
    (warm,) = stand.node.live
    await asyncio.sleep(2.1)  # kept connections have ended: the next request dials
    stand.node.is_reachable = False
    requests = [asyncio.create_task(stand.get(f"/{app}/health")) for app in ("warm", "cold") * 3]
    await asyncio.sleep(0.5)
    assert not any(request.done() for request in requests)
    stand.node.is_reachable = True
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}
    assert warm in stand.node.live
    app = await stand.app("cold")
    assert app["failures"] == 0


async def test_a_node_that_stays_away_is_said(
    stand: Any, text: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nagara.control.dispatch.AWAY_S", 0.3)
    await stand.up(text(timeouts='{queue = "1s"}'))
    await stand.get("/smol/health")
    await asyncio.sleep(2.1)
    stand.node.is_reachable = False
    status, body = await stand.get("/smol/health")
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (503, "queue_timeout")
    stand.node.is_reachable = True
