"""The engine itself, saved and put back: its weights are not in the snapshot, its canary has a
logprob, and clones answer alike."""

import asyncio
import json
from itertools import pairwise

import pytest
import pytest_asyncio

from nagara.cli.example_app import engine_app
from nagara.contract.replica import ModelMount, StartKind
from nagara.control.appfile import parse_apps

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

CLONES = 3
SAMPLES = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(shared, smollm2, state_dir):
    """The engine's app, saved."""
    (shared.state / "models").symlink_to((state_dir / "models").resolve())
    (app,) = parse_apps(engine_app("engine", "smollm2"), "f")
    spec = app.spec((ModelMount("smollm2", smollm2.digest),))
    report = await shared.capture(spec)
    assert report.reason is None
    return spec


async def test_its_weights_are_not_in_the_snapshot(shared, engine, smollm2):
    (root,) = shared.roots("engine")
    saved = [path.read_bytes() for path in shared.objects(root).values()]
    weights = max(smollm2.path.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = weights.read_bytes()
    step = len(content) // (SAMPLES + 1)
    samples = [content[at : at + 256] for at in range(step, len(content) - 256, step)]
    assert all(len(set(one)) > 16 and first != one for first, one in pairwise(samples))
    assert [at for at, one in enumerate(samples) if any(one in part for part in saved)] == []
    assert any(b"nagara.engine" in part for part in saved)  # what is there is found


async def test_its_canary_has_a_logprob_that_decides(shared, engine):
    (root,) = shared.roots("engine")
    (answer,) = json.loads(shared.about(root)["canary_answer"])
    assert answer["first_logprob"] < 0
    right = root.read_bytes()
    other = json.dumps([{**answer, "first_logprob": answer["first_logprob"] - 0.5}])
    shared.forge(root, canary_answer=other)
    report = await shared.start(engine)
    root.write_bytes(right)
    await shared.stop(report.replica)
    assert report.kind is StartKind.PLAIN
    assert "the canary answered" in report.fallback


async def test_clones_at_once_are_all_put_back_and_answer_alike(shared, engine):
    reports = await asyncio.gather(*(shared.start(engine) for _ in range(CLONES)))
    assert [(r.kind, r.fallback) for r in reports] == [(StartKind.RESTORED, None)] * CLONES
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
    replicas = [report.replica for report in reports]
    answers = await asyncio.gather(
        *(shared.ask(replica, "/v1/completions", body) for replica in replicas)
    )
    texts = {json.loads(answer.body)["choices"][0]["text"] for answer in answers}
    assert len(texts) == 1
    await shared.stop(*replicas)
