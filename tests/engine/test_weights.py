"""Weights stay pages of their file as long as their type is not changed."""

from pathlib import Path

import pytest
import torch

from nagara.engine.config import parse_model_config
from nagara.engine.errors import ModelFolderError, UnsupportedError
from nagara.engine.flat_weights import can_pack, pack_weights, take_flat_weights
from nagara.engine.modelfolder import check_model_folder
from nagara.engine.weights import MappedWeights, pick_dtype


def test_tensors_of_the_wanted_type_are_mapped_and_not_copied(tiny):
    weights = MappedWeights(check_model_folder(tiny), torch.float32)
    tensor = weights.take("model.embed_tokens.weight", (400, 64))
    assert weights.copied_bytes == 0
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line for line in maps if str(tiny / "model.safetensors") in line]
    starts_ends = [tuple(int(x, 16) for x in line.split()[0].split("-")) for line in ranges]
    assert any(start <= tensor.data_ptr() < end for start, end in starts_ends)


def test_the_values_are_those_of_the_file(tiny):
    from safetensors.torch import load_file

    expected = load_file(tiny / "model.safetensors")["model.norm.weight"]
    weights = MappedWeights(check_model_folder(tiny), torch.float32)
    assert torch.equal(weights.take("model.norm.weight", (64,)), expected)


def test_another_type_is_copied_and_counted(tiny):
    weights = MappedWeights(check_model_folder(tiny), torch.bfloat16)
    assert weights.take("model.norm.weight", (64,)).dtype is torch.bfloat16
    assert weights.copied_bytes == 128


def test_a_missing_tensor_and_a_wrong_shape_are_refused(tiny):
    weights = MappedWeights(check_model_folder(tiny), torch.float32)
    with pytest.raises(ModelFolderError, match="no tensor"):
        weights.take("model.other", (1,))
    with pytest.raises(ModelFolderError, match="shape"):
        weights.take("model.norm.weight", (65,))


def test_packed_products_equal_plain_ones_up_to_rounding(tiny):
    if not can_pack(torch.bfloat16):
        pytest.skip("this processor does not multiply bfloat16")
    folder = check_model_folder(tiny)
    plain = take_flat_weights(
        parse_model_config(folder.config), MappedWeights(folder, torch.bfloat16)
    )
    packed, size = pack_weights(plain)
    x = torch.randn(5, 64).bfloat16()
    expected = torch.nn.functional.linear(x.float(), plain.layers[0].gate.weight.float())
    assert torch.allclose(packed.layers[0].gate(x).float(), expected, rtol=0.02, atol=0.05)
    assert size > 0


def test_weights_moved_to_a_device_stay_tied(tiny):
    folder = check_model_folder(tiny)
    taken = take_flat_weights(
        parse_model_config(folder.config), MappedWeights(folder, torch.float32)
    )
    moved = taken.to(torch.device("cpu"))
    assert moved.head is moved.embedding
    assert torch.equal(moved.layers[1].down.weight, taken.layers[1].down.weight)


def test_auto_computes_in_the_stored_type():
    assert pick_dtype("auto", "bfloat16") is torch.bfloat16
    assert pick_dtype("auto", "float32") is torch.float32
    assert pick_dtype("auto", "float16") is torch.bfloat16
    with pytest.raises(UnsupportedError):
        pick_dtype("int8", "float32")
