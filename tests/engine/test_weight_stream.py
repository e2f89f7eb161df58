"""Weights read by several readers are the file's, in the order of use, or are refused."""

import ctypes
import errno
import json
import mmap
import os
import shutil
import threading

import numpy as np
import pytest

from nagara.engine import weight_stream, weight_values
from nagara.engine.errors import ModelFolderError
from nagara.engine.modelfolder import check_model_folder, read_safetensors_header
from nagara.engine.weight_stream import HostTarget, NoTarget, WeightStream, in_order, values_of
from nagara.engine.weight_values import CHUNK_BYTES, fold, fold_bytes, read_values

SIZES = {
    "model.embed_tokens.weight": 3 * CHUNK_BYTES + 77,
    "model.layers.10.up.weight": 17,
    "model.layers.2.up.weight": 20 * CHUNK_BYTES + 4096,
    "model.layers.2.norm.weight": 1,
    "model.empty": 0,
    "model.norm.weight": 511,
    "lm_head.weight": CHUNK_BYTES,
}


@pytest.fixture
def model(tmp_path):
    """A file with tensors of awkward sizes; its places by name."""
    header, at = {}, 0
    for name, size in SIZES.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + 3)  # so that nothing lies on a page border
    file = tmp_path / "model.safetensors"
    draw = np.random.default_rng(1)
    file.write_bytes(len(text).to_bytes(8, "little") + text + draw.bytes(at))
    return read_safetensors_header(file)


class Memory:
    """Room for all tensors."""

    def __init__(self, places):
        self.pages = {name: mmap.mmap(-1, max(1, p.end - p.start)) for name, p in places.items()}

    def targets(self, places):
        return [
            (place, HostTarget(ctypes.addressof(ctypes.c_uint8.from_buffer(self.pages[name]))))
            for name, place in places.items()
        ]

    def holds(self, places):
        for name, place in places.items():
            with place.file.open("rb") as stream:
                stream.seek(place.start)
                expected = stream.read(place.end - place.start)
            assert self.pages[name][: len(expected)] == expected, name


def check_values(places, expected):
    """Reads for the values alone."""
    stream = WeightStream([(place, NoTarget()) for place in places], expected)
    stream.begin()
    return stream.finish()


def flip(place, offset=0):
    """Changes one bit of a tensor in its file."""
    with place.file.open("r+b") as stream:
        stream.seek(place.start + offset)
        byte = stream.read(1)[0]
        stream.seek(place.start + offset)
        stream.write(bytes([byte ^ 4]))


def give_up_cache(file):
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("has_compiler", [True, False])
@pytest.mark.parametrize("is_cached", [True, False])
def test_every_byte_arrives(model, monkeypatch, readers, has_compiler, is_cached):
    if not has_compiler:
        monkeypatch.setattr(weight_values, "_kernels", lambda: None)
    file = next(iter(model.values())).file
    if is_cached:
        file.read_bytes()
    else:
        give_up_cache(file)
    memory = Memory(model)
    stream = WeightStream(memory.targets(model), readers=readers)
    stream.begin()
    done = stream.finish()
    memory.holds(model)
    assert done.size_bytes == sum(SIZES.values())
    assert stream.progress().done_bytes == done.size_bytes
    assert done.values == values_of(model.values())
    if is_cached:  # somebody else may have emptied the cache meanwhile, but not each time
        shares = []
        for _ in range(5):
            file.read_bytes()
            again = WeightStream(memory.targets(model), done.values, readers=readers)
            again.begin()
            shares.append(again.finish().cached_bytes)
        assert max(shares) == done.size_bytes


def test_without_reading_past_the_cache_it_reads_through_it(model, monkeypatch):
    real = os.open

    def refusing(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refusing)
    monkeypatch.setattr(weight_values, "_kernels", lambda: None)
    memory = Memory(model)
    stream = WeightStream(memory.targets(model))
    stream.begin()
    stream.finish()
    memory.holds(model)


def test_the_two_ways_of_folding_agree():
    for size in (0, 1, 8, 511, 512, 513, 4096, CHUNK_BYTES - 1, CHUNK_BYTES):
        data = np.random.default_rng(size).integers(0, 256, size + 1, dtype=np.uint8)
        copy = np.zeros_like(data)
        for source, target in ((0, 0), (1, 0), (0, 1)):
            length = max(0, size - max(source, target))
            lanes = fold(data.ctypes.data + source, length, copy.ctypes.data + target)
            assert lanes == fold_bytes(data[source : source + length])
            assert (copy[target : target + length] == data[source : source + length]).all()


def test_no_change_of_one_bit_goes_unnoticed():
    data = bytearray(range(256)) * 8
    lanes = fold_bytes(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert fold_bytes(data) != lanes
        data[bit // 8] ^= 1 << bit % 8


def test_layers_come_in_the_order_of_the_computation(model):
    names = [place.name for place in in_order(model.values())]
    assert names[0] == "model.embed_tokens.weight"
    assert names[1:4] == [
        "model.layers.2.up.weight",
        "model.layers.2.norm.weight",
        "model.layers.10.up.weight",
    ]


def test_the_first_layers_can_be_used_while_the_last_are_read(model):
    memory = Memory(model)
    stream = WeightStream(memory.targets(model), readers=1)
    stream.begin()
    stream.wait_for(["model.embed_tokens.weight"])
    place = model["model.embed_tokens.weight"]
    memory.holds({place.name: place})
    stream.finish()


def test_whoever_waits_is_told_how_far_it_has_come(model):
    gate, told = threading.Event(), []

    class Waiting(HostTarget):
        def take_cached(self, *_):
            return 0, []

        def put(self, *more):
            gate.wait(60)
            return super().put(*more)

    memory = Memory(model)
    targets = [(place, Waiting(target.address)) for place, target in memory.targets(model)]
    stream = WeightStream(targets, readers=1)
    stream.begin()

    def tell(progress):
        told.append(progress)
        gate.set()

    stream.finish(tell, every_s=0.01)
    assert told[0].done_bytes == 0
    assert told[0].total_bytes == sum(SIZES.values())
    memory.holds(model)


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size])
def test_a_changed_value_is_found(model, name):
    expected = values_of(model.values())
    assert check_values(model.values(), expected).values == expected
    flip(model[name], SIZES[name] - 1)
    with pytest.raises(ModelFolderError, match=f"other values for '{name}'"):
        check_values(model.values(), expected)


def test_another_models_file_is_found(model, tmp_path):
    expected = values_of(model.values())
    file = next(iter(model.values())).file
    other = tmp_path / "other"
    text = bytearray(file.read_bytes())
    text[-CHUNK_BYTES:] = text[-CHUNK_BYTES:][::-1]
    other.write_bytes(text)
    other.rename(file)
    with pytest.raises(ModelFolderError, match="other values"):
        check_values(read_safetensors_header(file).values(), expected)


def test_a_tensor_that_is_expected_and_not_there_is_missed(model):
    expected = {**values_of(model.values()), "model.layers.3.up.weight": "0" * 32}
    with pytest.raises(ModelFolderError, match=r"lacks 'model.layers.3.up.weight'"):
        check_values(model.values(), expected)


def test_a_file_that_is_truncated_after_the_look_at_its_header_is_found(model):
    file = next(iter(model.values())).file
    os.truncate(file, file.stat().st_size - CHUNK_BYTES // 2)
    with pytest.raises(ModelFolderError, match="is truncated"):
        values_of(model.values())
    file.unlink()
    with pytest.raises(ModelFolderError, match="cannot be read"):
        values_of(model.values())


def test_whoever_waits_hears_of_a_failure(model):
    file = next(iter(model.values())).file
    os.truncate(file, 4096)
    stream = WeightStream(Memory(model).targets(model))
    stream.begin()
    with pytest.raises(ModelFolderError):
        stream.wait_for(["lm_head.weight"])
    with pytest.raises(ModelFolderError):
        stream.finish()


def test_a_folder_keeps_the_values_it_was_made_with(tiny, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(tiny, folder)
    assert read_values(folder) is None
    values = values_of(check_model_folder(folder).tensors.values())
    record = folder / weight_values.RECORD_FILE
    record.write_text(json.dumps({"name": "x"}))
    assert read_values(folder) is None  # added by an earlier version
    record.write_text(json.dumps({"weights": values}))
    assert read_values(folder) == values
    record.write_text('{"weights": 2}')
    with pytest.raises(ModelFolderError, match="no table"):
        read_values(folder)


def test_spans_are_neighbours_and_cover_everything(model):
    places = in_order(model.values())
    spans = weight_stream.plan(places)
    covered = {}
    for span in spans:
        size = span.end - span.parts[0].start
        assert size <= weight_stream.SPAN_BYTES
        assert size == sum(part.size for part in span.parts)
        for part in span.parts:
            covered[part.tensor] = covered.get(part.tensor, 0) + part.size
    assert covered == {at: p.end - p.start for at, p in enumerate(places) if p.end > p.start}
