"""Kernels are compiled once, kept by the hash of all that made them, and agree with torch."""

import os
import platform
import statistics
from dataclasses import fields, is_dataclass

import pytest
import torch

from nagara.engine.config import parse_model_config
from nagara.engine.errors import UnsupportedError
from nagara.engine.flat import FlatModel
from nagara.engine.flat_c import CFlatModel, why_not
from nagara.engine.flat_weights import take_flat_weights
from nagara.engine.inputs import RunShape, StepInputs
from nagara.engine.kernels import build
from nagara.engine.modelfolder import check_model_folder
from nagara.engine.weights import MappedWeights

FAMILIES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma"]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    folder = tmp_path / "kernels"
    monkeypatch.setenv("NAGARA_ENGINE_CACHE", str(folder))
    return folder


def test_a_kernel_is_compiled_once_and_found_again(cache):
    first = build.find_or_compile(is_bfloat16=False)
    stamp = first.stat().st_mtime_ns
    assert build.find_or_compile(is_bfloat16=False) == first
    assert first.stat().st_mtime_ns == stamp
    assert [file.name for file in cache.iterdir()] == [first.name]


def test_another_text_gets_another_name(cache, monkeypatch, tmp_path):
    name = build._text_mark(build.SOURCE, build.FLAGS)
    other = tmp_path / "flat.c"
    other.write_text(build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build, "SOURCE", other)
    assert build._text_mark(build.SOURCE, build.FLAGS) != name


def test_a_text_that_does_not_compile_leaves_nothing_behind(cache, monkeypatch, tmp_path):
    broken = tmp_path / "flat.c"
    broken.write_text("int f( {")
    monkeypatch.setattr(build, "SOURCE", broken)
    with pytest.raises(UnsupportedError, match="refuses"):
        build.find_or_compile(is_bfloat16=False)
    assert list(cache.iterdir()) == []


def test_without_a_compiler_the_reason_is_told(cache, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UnsupportedError, match="no C compiler"):
        build.find_or_compile(is_bfloat16=False)


def test_a_folder_that_others_can_write_to_is_not_trusted(cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(UnsupportedError, match="no folder"):
        build.find_or_compile(is_bfloat16=False)


def test_a_folder_that_cannot_be_made_is_passed_over(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    good = tmp_path / "good"
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "file" / "below", good])
    assert build.find_or_compile(is_bfloat16=False).parent == good


def step_of(lengths, config):
    """A step with runs of these (start, rows)."""
    ids, positions, row_run, shapes, last = [], [], [], [], []
    width = max((start + rows + 15) // 16 for start, rows in lengths)
    generator = torch.Generator().manual_seed(1)
    for i, (start, rows) in enumerate(lengths):
        shapes.append(RunShape(len(ids), rows, start))
        ids += torch.randint(config.vocab, (rows,), generator=generator).tolist()
        positions += range(start, start + rows)
        row_run += [i] * rows
        last.append(len(ids) - 1)
    table = torch.randperm(len(lengths) * width, generator=generator).int()
    return StepInputs(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(row_run),
        table.view(len(lengths), width),
        torch.tensor(last),
        tuple(shapes),
    )


def run_twice(model, step):
    """Logits of a step, and of the same again: the second also reads what the first wrote."""
    model.make_cache(16, 16)
    first = model.forward(step).clone()
    return torch.cat([first, model.forward(step)])


STEP = [(0, 1), (0, 40), (0, 17)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_c_kernel_agrees_with_torch(make_model, family):
    folder = check_model_folder(make_model(family))
    config = parse_model_config(folder.config)
    weights = take_flat_weights(config, MappedWeights(folder, torch.float32))
    step = step_of(STEP, config)
    ours = run_twice(CFlatModel(config, weights, torch.float32, 16), step)
    cpu = torch.device("cpu")
    theirs = run_twice(FlatModel(config, weights, torch.float32, cpu), step)
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_c_kernel_errs_no_more_in_bfloat16_than_torch(make_model):
    """Over all families: random models amplify single roundings, so one alone says little."""
    ratios = []
    for family in FAMILIES:
        folder = check_model_folder(make_model(family))
        config = parse_model_config(folder.config)
        weights = take_flat_weights(config, MappedWeights(folder, torch.bfloat16))
        step, cpu = step_of(STEP, config), torch.device("cpu")
        ours = run_twice(CFlatModel(config, weights, torch.bfloat16, 16), step)
        theirs = run_twice(FlatModel(config, weights, torch.bfloat16, cpu), step)
        exact = run_twice(FlatModel(config, widened(weights), torch.float32, cpu), step)
        errors = [float((some - exact).square().mean()) for some in (ours, theirs)]
        ratios.append(errors[0] / errors[1])
    assert statistics.geometric_mean(ratios) < 1.5


def widened(value):
    """The same numbers in float32."""
    if isinstance(value, torch.Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(widened(item) for item in value)
    if is_dataclass(value):
        return type(value)(*(widened(getattr(value, f.name)) for f in fields(value)))
    return value


def test_shapes_that_do_not_fit_are_named(make_model):
    config = parse_model_config(check_model_folder(make_model("llama")).config)
    assert why_not(config, 16) is None
    assert "block size" in why_not(config, 8)


def test_loading_a_kernel_leaves_the_float_mode_of_the_process_alone(cache):
    """A library linked with fast math would flush small numbers to zero from then on."""
    build.load_kernel(is_bfloat16=False)
    smallest = torch.tensor([1e-40])
    assert float(smallest * 1.0) > 0
    assert os.environ.get("NAGARA_ENGINE_CACHE")


def test_without_a_compiler_one_that_was_compiled_before_is_taken(cache, monkeypatch):
    made = build.find_or_compile(is_bfloat16=True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.find_or_compile(is_bfloat16=True) == made
    with pytest.raises(UnsupportedError, match="no C compiler"):
        build.find_or_compile(is_bfloat16=False)


def test_a_kernel_for_a_lesser_cpu_is_another_one(cache, monkeypatch):
    own = build.find_or_compile(is_bfloat16=False)
    monkeypatch.setenv(build.LEVEL_VARIABLE, "x86-64-v2")
    if platform.machine() != "x86_64":
        pytest.skip("needs an x86-64 CPU")
    lesser = build.find_or_compile(is_bfloat16=False)
    assert lesser != own
    assert build.find_or_compile(is_bfloat16=False) == lesser
