"""Angles equal those of transformers; kinds that depend on the batch are refused."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nagara.engine.config import parse_general_config, parse_model_config
from nagara.engine.errors import UnsupportedError
from nagara.engine.rope import rope_frequencies
from nagara.engine.rope_config import parse_rope

TRAINED = {"original_max_position_embeddings": 256}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, **TRAINED},
        {"rope_type": "yarn", "factor": 1.0, **TRAINED},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, **TRAINED},
        {"rope_type": "yarn", "factor": 8.0, "truncate": False, **TRAINED},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3, **TRAINED},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.4, **TRAINED},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **TRAINED,
        },
    ],
    ids=lambda p: "-".join(str(v) for v in p.values()),
)
def test_frequencies_and_scale_equal_those_of_transformers(parameters):
    parameters = {**parameters, "rope_theta": 10000.0}
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters=dict(parameters),
    )
    expected, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    ours = parse_rope({"rope_parameters": parameters, "max_position_embeddings": 1024})
    torch.testing.assert_close(rope_frequencies(ours, 64), expected, rtol=1e-6, atol=0)
    assert ours.angle_scale == pytest.approx(scale)


SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_kind_that_changes_with_the_batch_is_refused_on_every_path(kind, key):
    raw = {**SIZES, key: {"type": kind, "factor": 2.0}}
    for parse in (parse_model_config, parse_general_config):
        with pytest.raises(UnsupportedError, match=kind):
            parse(raw)


def test_it_is_found_among_the_ropes_of_single_kinds_of_layers():
    ropes = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {}}
    with pytest.raises(UnsupportedError, match="dynamic"):
        parse_general_config({**SIZES, "rope_parameters": ropes})
