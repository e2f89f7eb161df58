"""Versions of an app: changed under load, changed back, and when the new one is broken."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.control.autoscaler import ReplicaView
from nagara.control.rollout import Roll, give_way, roll


def old(*running: int) -> tuple[ReplicaView, ...]:
    return tuple(ReplicaView(f"o{n}", True, count, 0.0) for n, count in enumerate(running))


async def replica_of(stand: Any) -> str:
    async with stand.client.get("/smol/echo") as answer:
        assert answer.status == 200
        return str((await answer.json())["replica"])


def test_old_replicas_go_one_by_one_as_new_ones_come() -> None:
    assert roll(3, 0, 0, old(1, 0, 2)) == Roll(start=3)
    assert roll(3, 0, 3, old(1, 0, 2)) == Roll()
    assert roll(3, 1, 2, old(1, 0, 2)) == Roll(drain=("o1",))  # the idle one first
    assert roll(3, 3, 0, old(1, 2)) == Roll(drain=("o0", "o1"))
    assert roll(3, 0, 0, ()) == Roll()
    assert give_way(old(3, 1)) == ("o1",)
    assert give_way(()) == ()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.lists(st.integers(0, 3)))
def test_an_app_in_use_never_has_fewer_ready_replicas_than_before(
    target: int, ready: int, starting: int, running: list[int]
) -> None:
    step = roll(target, ready, starting, old(*running))
    left = ready + len(running) - len(step.drain)
    assert left >= min(target, ready + len(running))
    assert not running or ready + starting + step.start >= target or not target


async def test_a_changed_definition_replaces_the_replicas_and_no_request_waits(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    first = await replica_of(stand)
    await stand.deploy(text(scale="{max = 2}"))
    assert await replica_of(stand) == first  # the same definition
    stand.node.scripts["smol"].plain_s = 0.5
    await stand.deploy(text(env='{A = "1"}'))
    assert (await stand.app())["outdated"] == 1
    async with stand.client.get("/smol/health") as answer:
        assert answer.headers["x-nagara-replica"] == first  # still there meanwhile
        assert answer.headers["x-nagara-cold-start-ms"] == "0"
    await until(lambda: len(stand.node.live) == 1 and first not in stand.node.live)
    assert await replica_of(stand) != first
    app = await stand.app()
    assert (app["version"], app["outdated"]) == (3, 0)


async def test_requests_that_run_on_the_old_version_may_end(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    waiting = asyncio.create_task(stand.get("/smol/wait"))
    await until(lambda: bool(stand.node.live) and stand.replica().running == 1)
    (first,) = stand.node.live
    old_replica = stand.replica()
    await stand.deploy(text(env='{A = "1"}'))

    async def has_new() -> bool:
        return bool(await replica_of(stand) != first)

    await until(has_new)
    assert first in stand.node.live
    old_replica.let_go()
    assert (await waiting)[0] == 200
    await until(lambda: first not in stand.node.live)


async def test_a_version_that_cannot_start_leaves_the_one_before_serving(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    first = await replica_of(stand)
    stand.node.scripts["smol"].always_fails = "broken"
    await stand.deploy(text(env='{A = "1"}'))

    async def has_failed_twice() -> bool:
        return bool((await stand.app())["failures"] >= 2)

    await until(has_failed_twice)
    for _ in range(20):
        assert await replica_of(stand) == first
    app = await stand.admin("POST", "/api/apps/smol/rollback")
    assert (app["version"], app["outdated"], app["failures"]) == (1, 0, 0)
    assert await replica_of(stand) == first


async def test_without_a_slot_beside_it_an_old_replica_gives_its_own(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text(), slots=1)
    first = await replica_of(stand)
    await stand.deploy(text(env='{A = "1"}'))

    async def has_new() -> bool:
        return bool(await replica_of(stand) != first)

    await until(has_new)
    assert stand.node.most_live == 1


async def test_versions_are_listed_and_can_be_taken_back(stand: Any, text: Any) -> None:
    await stand.up(text())
    for number in range(2, 5):
        await stand.deploy(text(env=f'{{A = "{number}"}}'))
    versions = (await stand.admin("GET", "/api/apps/smol/versions"))["versions"]
    assert [one["version"] for one in versions] == [4, 3, 2, 1]
    assert [one["is_present"] for one in versions] == [True, False, False, False]
    app = await stand.admin("POST", "/api/apps/smol/rollback")
    assert (app["version"], app["definition"]) == (3, versions[1]["definition"])
    app = await stand.admin("POST", "/api/apps/smol/rollback?to=1")
    assert (app["version"], app["definition"]) == (1, versions[3]["definition"])
    (app,) = await stand.deploy(text(env='{A = "5"}'))
    assert app["version"] == 5
    await stand.admin("POST", "/api/apps/smol/rollback?to=1")
    await stand.down()
    await stand.up()
    assert (await stand.app())["version"] == 1


@pytest.mark.parametrize(
    ("path", "status"),
    [("rollback", 404), ("rollback?to=7", 404), ("rollback?to=x", 400), ("rollback?to=-1", 400)],
)
async def test_a_version_that_is_not_there(stand: Any, text: Any, path: str, status: int) -> None:
    await stand.up(text())
    token = (stand.folder / "admin.token").read_text().strip()
    headers = {"Authorization": f"Bearer {token}"}
    async with stand.client.post(f"/api/apps/smol/{path}", headers=headers) as answer:
        assert answer.status == status


async def test_a_rollback_comes_from_the_snapshot_of_that_version(
    stand: Any, text: Any, until: Any
) -> None:
    stand.node.scripts["smol"].can_snapshot = True
    await stand.up(text())
    await replica_of(stand)
    await until(lambda: bool(stand.node.captured))
    await stand.deploy(text(env='{A = "1"}'))
    await stand.admin("POST", "/api/apps/smol/rollback")
    await stand.admin("POST", "/api/apps/smol/fold")
    await replica_of(stand)
    starts = (await stand.admin("GET", "/api/trace/smol"))["starts"]
    assert starts[0]["kind"] == "restored"


async def test_a_restart_in_the_middle_of_a_change_loses_no_replica(
    stand: Any, text: Any, until: Any
) -> None:
    await stand.up(text())
    first = await replica_of(stand)
    stand.node.scripts["smol"].always_fails = "not yet"
    await stand.deploy(text(env='{A = "1"}'))
    await stand.down(keep=True)
    assert list(stand.node.live) == [first]
    await stand.up()
    assert await replica_of(stand) == first
    stand.node.scripts["smol"].always_fails = None
    await until(lambda: bool(stand.node.live) and first not in stand.node.live, 60)
    assert await replica_of(stand) != first
