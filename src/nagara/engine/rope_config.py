"""What a `config.json` says about rotary position embedding, in both spellings of transformers.

Pure. Kinds whose angles depend on the longest sequence at hand are refused for every model: in a
batch of many sequences a request's answer would depend on its batch mates.
"""

import math
from dataclasses import dataclass
from typing import Any

from nagara.engine.errors import UnsupportedError

FIXED = ("default", "linear", "llama3", "yarn")
MOVING = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base and how it is stretched beyond the trained length."""

    theta: float
    kind: str = "default"  # default, linear, llama3 or yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    has_whole_pairs: bool = True
    angle_scale: float = 1.0  # of the cosines and sines


def parse_rope(raw: dict[str, Any]) -> RopeConfig:
    """Raises UnsupportedError for what the flat forward does not turn."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    kind = _kind(parameters)
    if kind not in FIXED:
        raise UnsupportedError(f"rope type {kind!r} is not supported", where="config.json")
    if float(raw.get("partial_rotary_factor") or parameters.get("partial_rotary_factor") or 1) != 1:
        raise UnsupportedError("partial rotary embedding is not supported", where="config.json")
    trained = parameters.get("original_max_position_embeddings")
    if trained is None and kind == "yarn":
        trained = raw.get("max_position_embeddings")
    factor = float(parameters.get("factor") or 1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_context=int(trained or 0),
        fast_turns=float(parameters.get("beta_fast") or 32.0),
        slow_turns=float(parameters.get("beta_slow") or 1.0),
        has_whole_pairs=bool(parameters.get("truncate", True)),
        angle_scale=_yarn_scale(parameters, factor) if kind == "yarn" else 1.0,
    )


def refuse_moving_rope(raw: dict[str, Any]) -> None:
    """Raises UnsupportedError if any of the model's ropes depends on the batch."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    for one in (parameters, *(v for v in parameters.values() if isinstance(v, dict))):
        if _kind(one) in MOVING:
            raise UnsupportedError(
                f"rope type {_kind(one)!r} changes with the longest sequence at hand",
                where="config.json",
            )


def _kind(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _yarn_scale(parameters: dict[str, Any], factor: float) -> float:
    """How much longer queries and keys become, which sharpens attention (YaRN's temperature)."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    up, down = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if up and down:
        return _sharpened(factor, float(up)) / _sharpened(factor, float(down))
    return _sharpened(factor, 1.0)


def _sharpened(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
