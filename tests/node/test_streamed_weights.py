"""The real engine with its weights released before the snapshot and streamed after it.

On a CPU, where its weights lie in memory of its own for this; on a GPU it is the same path.
"""

import json

import pytest

from nagara.contract.replica import Canary, ModelMount, StartKind, WeightsRead
from nagara.control.presets import PRESETS
from nagara.node.asking import weights_in

pytestmark = pytest.mark.root
SERVE = ("nagara", "engine", "serve", "/models/smollm2", "--port", "${PORT}")
OPTIONS = ("--weights", "streamed", "--cache-tokens", "512", "--context", "256")
ASK = json.dumps({"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0})


def spec_of(yard, smollm2, preset):
    return yard.spec(
        app=preset,
        command=(*SERVE, *OPTIONS),
        ready_path="/health",
        canary=Canary("/v1/completions", ASK, is_openai=True),
        models=(ModelMount("smollm2", smollm2.digest),),
        hooks=PRESETS[preset],
        start_timeout_s=120.0,
        env={"OMP_NUM_THREADS": "2"},
    )


async def test_weights_are_left_out_and_come_back_with_the_restore(yard, smollm2):
    (yard.state / "models").symlink_to(smollm2.path.parent.resolve())
    saved = {}
    for preset in ("nagara", "nagara-carried"):
        report = await yard.capture(spec_of(yard, smollm2, preset))
        assert report.reason is None
        saved[preset] = report.memory_bytes
    weights_bytes = sum(file.stat().st_size for file in smollm2.path.glob("*.safetensors"))
    assert saved["nagara-carried"] - saved["nagara"] > 0.9 * weights_bytes
    started = await yard.start(spec_of(yard, smollm2, "nagara"))
    assert started.kind is StartKind.RESTORED, started.fallback  # its canary gave the same answer
    assert isinstance(started.files.weights, WeightsRead)
    assert 0.9 * weights_bytes < started.files.weights.size_bytes <= weights_bytes
    assert started.files.weights.seconds > 0
    assert started.stages["device"] >= started.files.weights.seconds
    carried = await yard.start(spec_of(yard, smollm2, "nagara-carried"))
    assert carried.kind is StartKind.RESTORED, carried.fallback
    assert carried.files.weights is None
    texts = [
        json.loads((await yard.ask(replica, "/v1/completions", ASK)).body)["choices"][0]["text"]
        for replica in (started.replica, carried.replica)
    ]
    assert texts[0] == texts[1]


async def test_a_plain_start_says_how_its_weights_came(yard, smollm2):
    (yard.state / "models").symlink_to(smollm2.path.parent.resolve())
    started = await yard.start(spec_of(yard, smollm2, "nagara"))
    assert started.kind is StartKind.PLAIN
    weights_bytes = sum(file.stat().st_size for file in smollm2.path.glob("*.safetensors"))
    assert started.files.weights is not None
    assert 0.9 * weights_bytes < started.files.weights.size_bytes <= weights_bytes
    assert started.files.weights.seconds > 0
    answer = (await yard.ask(started.replica, "/health")).body
    assert weights_in(answer) == started.files.weights


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"ok", b"[]", b"{}", b'{"weights": 5}', b'{"weights": {"size_bytes": 1}}',
        b'{"weights": {"size_bytes": -1, "seconds": 1}}',
        b'{"weights": {"size_bytes": 1, "seconds": NaN}}',
        b'{"weights": {"size_bytes": Infinity, "seconds": 1}}',
        b'{"weights": {"size_bytes": 1, "seconds": 1e999}}',
        b'{"weights": {"size_bytes": 1, "seconds": -1}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_other_servers_answer_is_not_taken_for_weights(answer):
    assert weights_in(answer) is None
