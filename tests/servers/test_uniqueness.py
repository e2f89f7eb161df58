"""Four clones put back at once draw different numbers from every generator that libraries use."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from nagara.contract.replica import Canary, SnapshotHooks, StartKind

from .conftest import environment
from .real_servers import torch_command, workers_command

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CLONES = 4
WORKERS = 3
KINDS = ("uuid4", "random", "urandom", "numpy", "torch")


async def restored(shared: Any, spec: Any) -> list[str]:
    report = await shared.capture(spec)
    assert report.reason is None
    reports = await asyncio.gather(*(shared.start(spec) for _ in range(CLONES)))
    assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * CLONES
    return [report.replica for report in reports]


async def draw(shared: Any, replica: str) -> dict[str, Any]:
    answer = await shared.ask(replica, "/draw")
    assert answer.status == 200
    drawn: dict[str, Any] = json.loads(answer.body)
    return drawn


@pytest.mark.timeout(600)
async def test_clones_of_uvicorn_with_torch_by_a_module_of_its_own(
    shared: Any, environments: Path
) -> None:
    folder = environment(environments, "web")
    spec = shared.spec(
        app="torch",
        command=tuple(torch_command(folder)),
        canary=Canary("/infer"),
        start_timeout_s=300.0,
    )
    replicas = await restored(shared, spec)
    drawn = await asyncio.gather(*(draw(shared, replica) for replica in replicas))
    for kind in KINDS:
        assert len({answer[kind] for answer in drawn}) == CLONES, kind
    for replica in replicas:
        woken = json.loads((await shared.ask(replica, "/woken")).body)
        assert woken == ["rested", replica]
    await shared.stop(*replicas)
    assert shared.leftovers() == []


@pytest.mark.timeout(600)
async def test_clones_of_three_gunicorn_workers_without_a_change_to_their_code(
    shared: Any, environments: Path
) -> None:
    folder = environment(environments, "web")
    spec = shared.spec(
        app="gunicorn",
        command=tuple(workers_command(folder)),
        canary=Canary("/"),
        hooks=SnapshotHooks(in_python=True),
        start_timeout_s=300.0,
    )
    replicas = await restored(shared, spec)
    first: dict[tuple[str, int], dict[str, Any]] = {}
    while len(first) < CLONES * WORKERS:  # until each worker of each clone has answered
        for replica in replicas:
            for answer in await asyncio.gather(*(draw(shared, replica) for _ in range(12))):
                first.setdefault((replica, answer["worker"]), answer)
    for kind in KINDS:
        assert len({answer[kind] for answer in first.values()}) == CLONES * WORKERS, kind
    await shared.stop(*replicas)
    assert shared.leftovers() == []
