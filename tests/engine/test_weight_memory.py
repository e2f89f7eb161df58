"""Memory for weights on a GPU: with one where there is one, and the same logic without."""

import ctypes
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from nagara.engine import weight_memory
from nagara.engine.modelfolder import ModelFolder, read_safetensors_header
from nagara.engine.streamed_weights import StreamedWeights
from nagara.engine.weight_memory import CudaMemory, PinnedSlot, find_memory_saver
from nagara.engine.weight_values import CHUNK_BYTES, fold_bytes


@pytest.fixture(autouse=True)
def _nothing_found_yet():
    find_memory_saver.cache_clear()
    yield
    find_memory_saver.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """Tensors large and tiny, the latter more than a slot has spare room for."""
    sizes = [9 * CHUNK_BYTES + 6, *([2] * 400), CHUNK_BYTES // 2, 17 * CHUNK_BYTES]
    header, at = {}, 0
    for number, size in enumerate(sizes):
        ends = [at, at := at + size]
        entry = {"dtype": "BF16", "shape": [size // 2], "data_offsets": ends}
        header[f"model.layers.{number}.w"] = entry
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    data = np.random.default_rng(2).bytes(at)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return ModelFolder(tmp_path, {}, read_safetensors_header(file))


class FakeStream:
    """Copies when it is waited for and not before, as late as a device may."""

    def __init__(self, _device=None):
        self.held = []

    def synchronize(self):
        held, self.held = self.held, []
        for to, part in held:
            to.copy_(part)


@pytest.fixture
def without_gpu(monkeypatch):
    """Pinned memory and streams that need no device."""
    empty = torch.empty
    current = []

    def plain_empty(*size, pin_memory=False, **more):
        return empty(*size, **more)

    @contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    def copy(self, start, size, to):
        self._stream.held.append((to, self.memory[start : start + size]))

    monkeypatch.setattr(torch, "empty", plain_empty)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(PinnedSlot, "copy", copy)


class Saver:
    """Notes what it is asked for."""

    def __init__(self):
        self.said = []

    @contextmanager
    def region(self, tag):
        self.said.append(("region", tag))
        yield

    def pause(self, tag):
        self.said.append(("pause", tag))

    def resume(self, tag):
        self.said.append(("resume", tag))


def check(folder, weights):
    taken = {p.name: weights.take(p.name, p.shape) for p in folder.tensors.values()}
    weights.begin()
    done = weights.finish()
    for name, place in folder.tensors.items():
        with place.file.open("rb") as stream:
            stream.seek(place.start)
            data = bytearray(stream.read(place.end - place.start))
        expected = torch.frombuffer(data, dtype=torch.bfloat16)
        assert torch.equal(taken[name].cpu().view(torch.int16), expected.view(torch.int16)), name
    return done


@pytest.mark.parametrize("is_cached", [True, False])
def test_slots_are_not_reused_before_the_device_has_copied_them(
    folder, without_gpu, is_cached, monkeypatch
):
    if is_cached:
        (folder.path / "model.safetensors").read_bytes()
    else:
        monkeypatch.setattr(weight_memory, "carry", lambda *_: None)
    saver = Saver()
    memory = CudaMemory(torch.device("cpu"), saver)
    weights = StreamedWeights(folder, memory, readers=2)
    done = check(folder, weights)
    assert done.size_bytes == folder.weight_bytes
    if not is_cached:
        assert done.cached_bytes == 0
    weights.release()
    weights.reload()
    tag = CudaMemory.TAG
    assert saver.said == [("region", tag), ("pause", tag), ("resume", tag)]


def test_without_the_package_memory_stays(folder, without_gpu):
    weights = StreamedWeights(folder, CudaMemory(torch.device("cpu"), None), readers=1)
    assert not weights.can_release
    check(folder, weights)


def test_a_slot_begins_on_a_page(without_gpu):
    slot = PinnedSlot(3 * 4096, torch.device("cpu"))
    assert slot.address % 4096 == 0
    assert len(slot.view) == 3 * 4096
    slot.view[:4] = b"data"
    assert ctypes.string_at(slot.address, 4) == b"data"
    assert bytes(slot.memory[:4].numpy()) == b"data"


def test_the_package_is_used_as_it_documents(monkeypatch):
    class Package:
        class torch_memory_saver:  # noqa: N801 - the object's name in the package
            hook_mode = "preload"
            said = []  # noqa: RUF012

            @classmethod
            @contextmanager
            def region(cls, tag="default", enable_cpu_backup=False):
                cls.said.append((tag, enable_cpu_backup))
                yield

            @classmethod
            def pause(cls, tag=None):
                cls.said.append(("pause", tag))

            @classmethod
            def resume(cls, tag=None):
                cls.said.append(("resume", tag))

    monkeypatch.setattr(weight_memory.importlib, "import_module", lambda _name: Package)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    saver = find_memory_saver()
    assert find_memory_saver() is saver  # its way of working is set once
    package = Package.torch_memory_saver
    assert package.hook_mode == "torch"
    with saver.region("a"):
        pass
    saver.pause("a")
    saver.resume("a")
    assert package.said == [("a", False), ("pause", "a"), ("resume", "a")]


def test_the_package_may_be_absent(monkeypatch, caplog):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(weight_memory.importlib, "import_module", absent)
    assert find_memory_saver() is None
    assert "weights stay on the device" in caplog.text


@pytest.mark.gpu
def test_weights_reach_a_real_gpu_and_come_back_at_their_addresses(folder):
    saver = find_memory_saver()
    memory = CudaMemory(torch.device("cuda"), saver)
    weights = StreamedWeights(folder, memory, readers=2)
    check(folder, weights)
    if saver is None:
        pytest.skip("needs torch-memory-saver")
    place, free = memory._bytes.data_ptr(), torch.cuda.mem_get_info()[0]
    weights.release()
    assert torch.cuda.mem_get_info()[0] > free
    done = weights.reload()
    assert memory._bytes.data_ptr() == place
    assert done.size_bytes == folder.weight_bytes
    first = next(iter(folder.tensors.values()))
    here = weights.take(first.name, first.shape).cpu().view(torch.uint8).numpy().tobytes()
    with first.file.open("rb") as stream:
        stream.seek(first.start)
        assert fold_bytes(here[:CHUNK_BYTES]) == fold_bytes(stream.read(CHUNK_BYTES))
