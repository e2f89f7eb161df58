"""Weights and cache given up and taken back at the same addresses; the answers stay the same."""

import json
import shutil
from contextlib import contextmanager

import pytest
import torch

from nagara.engine.blocks import BlockPool
from nagara.engine.config import parse_model_config
from nagara.engine.engine import Engine
from nagara.engine.errors import EngineError, ModelFolderError, UnsupportedError
from nagara.engine.flat import FlatModel
from nagara.engine.flat_weights import take_flat_weights
from nagara.engine.graphs import RecordedGraphs
from nagara.engine.modelfolder import check_model_folder
from nagara.engine.request import SamplingParams
from nagara.engine.settings import EngineSettings
from nagara.engine.simulated import build_core, make_sequence
from nagara.engine.sleeping import CACHE_TAG, Rest
from nagara.engine.streamed_weights import StreamedWeights, can_stream
from nagara.engine.streams import inline_device
from nagara.engine.weight_memory import HostMemory
from nagara.engine.weight_stream import values_of

PROMPTS = [[5, 6, 7], [9] * 40]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture
def folder(tiny, tmp_path):
    """A model of its own, whose files may be changed."""
    copy = tmp_path / "model"
    shutil.copytree(tiny, copy)
    return copy


@pytest.fixture
def start(request):
    """Makes engines that are closed afterwards."""
    made = []

    def make(folder, **settings):
        engine = Engine(folder, EngineSettings(**{"weights": "streamed", "depth": 0, **settings}))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def answers(engine):
    return [out.token_ids for out in engine.generate(PROMPTS, GREEDY)]


def flip_a_bit(file, at=-1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kernel", ["c", "torch"])
def test_streamed_weights_give_the_answers_of_mapped_ones(folder, start, kernel):
    mapped, streamed = (start(folder, weights=way, kernel=kernel) for way in ("mapped", "streamed"))
    mapped.start()
    streamed.start()
    assert answers(mapped) == answers(streamed)


@pytest.mark.parametrize("kernel", ["c", "torch"])
def test_released_weights_come_back_and_the_cache_is_empty(folder, start, kernel):
    engine = start(folder, kernel=kernel)
    engine.start()
    before = answers(engine)
    engine.sleep(releases_weights=True)
    weights = engine._loaded.streamed
    assert not weights._bytes.any()  # the pages are gone, the addresses are not
    woken = engine.wake()
    assert woken.weights.size_bytes == check_model_folder(folder).weight_bytes
    assert engine.stats().cache_blocks_held == 0
    assert answers(engine) == before
    assert engine.stats().prefix_hit_share < 1


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"kernel": "transformers"}])
def test_what_cannot_be_streamed_is_refused_and_not_passed_over(folder, start, settings):
    with pytest.raises(UnsupportedError, match="streamed"):
        start(folder, **settings)


def test_weights_that_are_kept_are_not_read_again(folder, start):
    engine = start(folder)
    engine.start()
    before = answers(engine)
    engine.sleep()
    assert engine.wake().weights is None
    assert answers(engine) == before
    assert engine.wake() is None  # it was awake


@pytest.mark.parametrize("what", ["corrupted", "truncated", "swapped"])
def test_other_weights_are_found_before_a_token_is_served(folder, start, what):
    engine = start(folder)
    engine.start()
    engine.sleep(releases_weights=True)
    file = folder / "model.safetensors"
    if what == "corrupted":
        flip_a_bit(file)
    elif what == "truncated":
        file.write_bytes(file.read_bytes()[:-64])
    else:  # another model of the same shape
        data = file.read_bytes()
        size = len(data) // 4
        file.write_bytes(data[:-size] + data[-size:][::-1])
    with pytest.raises(EngineError, match="failed"):
        engine.wake()
    with pytest.raises(EngineError):
        engine.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("way", ["mapped", "streamed"])
def test_a_model_that_is_not_what_was_added_does_not_start(folder, start, way):
    values = values_of(check_model_folder(folder).tensors.values())
    (folder / "nagara-model.json").write_text(json.dumps({"weights": values}))
    start(folder, weights=way)
    flip_a_bit(folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match="other values"):
        start(folder, weights=way)


def test_the_cache_is_measured_anew(folder, start, monkeypatch):
    engine = start(folder, cache_tokens=None)
    engine.start()
    before = engine.stats().cache_blocks
    engine.sleep()
    monkeypatch.setattr("nagara.engine.settings.free_memory_bytes", lambda _device: 0)
    one = -(-engine.context // 16)
    assert engine.wake().blocks == one < before
    assert engine.stats().cache_blocks == one
    assert answers(engine)
    engine.sleep()
    monkeypatch.undo()
    assert engine.wake().blocks == before


def test_a_pool_does_not_change_its_size_while_it_is_used():
    pool = BlockPool(4, 16)
    block = pool.take()
    with pytest.raises(EngineError, match="held"):
        pool.resize(8)
    pool.publish(block, b"name")
    pool.release([block])
    pool.resize(2)
    assert (pool.count, pool.available, pool.find(b"name")) == (2, 2, None)
    pool.audit([])


class PoisoningSaver:
    """Gives memory up as a GPU's would be: what comes back has anything in it."""

    def __init__(self, model):
        self._model = model
        self.done = []

    @contextmanager
    def region(self, tag):
        yield

    def pause(self, tag):
        self.done.append(("pause", tag))
        self._model._cache.fill_(float("nan"))

    def resume(self, tag):
        self.done.append(("resume", tag))


def test_memory_that_comes_back_at_its_place_is_cleared(folder, start):
    engine = start(folder, kernel="torch")
    saver = PoisoningSaver(engine._model)
    pool = engine._scheduler.pool
    engine._rest = Rest(engine._loaded, pool, engine._device, engine.settings, saver)
    engine.start()
    before, place = answers(engine), engine._model._cache.data_ptr()
    engine.sleep(releases_weights=True)
    assert engine.wake().keeps_graphs
    assert engine._model._cache.data_ptr() == place
    assert answers(engine) == before
    assert saver.done == [("pause", CACHE_TAG), ("resume", CACHE_TAG)]


def test_a_cache_that_does_not_fit_again_is_made_anew(folder, start, monkeypatch):
    engine = start(folder, kernel="torch", cache_tokens=None)
    pool, before = engine._scheduler.pool, engine.stats().cache_blocks
    saver = PoisoningSaver(engine._model)
    engine._rest = Rest(engine._loaded, pool, engine._device, engine.settings, saver)
    engine.start()
    expected = answers(engine)
    engine.sleep()
    for module in ("settings", "sleeping"):
        monkeypatch.setattr(f"nagara.engine.{module}.free_memory_bytes", lambda _device: 0)
    woken = engine.wake()
    assert not woken.keeps_graphs
    assert woken.blocks < before
    assert answers(engine) == expected


@pytest.mark.gpu
def test_on_a_gpu_weights_go_and_come_and_graphs_stay_valid(folder, start):
    engine = start(folder, weights="auto", device="cuda", dtype="float32", cache_tokens=2048)
    engine.start()
    before = answers(engine)
    captured = len(engine._core.graphs)
    free = torch.cuda.mem_get_info()[0]
    engine.sleep(releases_weights=True)
    assert torch.cuda.mem_get_info()[0] > free
    woken = engine.wake()
    assert answers(engine) == before
    if not engine._loaded.streamed.can_release:
        pytest.skip("needs torch-memory-saver for the rest")
    assert woken.weights.size_bytes == check_model_folder(folder).weight_bytes
    assert woken.keeps_graphs
    assert len(engine._core.graphs) == captured > 0


def test_graphs_are_valid_after_weights_were_released_and_read_again(folder):
    checked = check_model_folder(folder)
    config = parse_model_config(checked.config, None)
    assert can_stream(checked, torch.float32)
    assert not can_stream(checked, torch.bfloat16)
    weights = StreamedWeights(checked, HostMemory(), readers=2)
    taken = take_flat_weights(config, weights)
    weights.begin()
    weights.finish()
    model = FlatModel(config, taken, torch.float32, torch.device("cpu"))
    core = build_core(
        model, inline_device(), 0, slots=2, blocks=40, context=128, chunk_rows=64,
        graphs=RecordedGraphs(), is_caching=False,
    )  # fmt: skip

    def generate():
        sequences = [make_sequence(i, prompt, GREEDY) for i, prompt in enumerate(PROMPTS)]
        for sequence in sequences:
            core.scheduler.add(sequence)
        while core.has_work:
            core.step()
        return [sequence.outputs for sequence in sequences]

    before = generate()
    captured, replayed = len(core.graphs), core.graphs.replayed
    weights.release()
    assert not taken.embedding.any()
    weights.reload()
    assert generate() == before
    assert len(core.graphs) == captured
    assert core.graphs.replayed > replayed
