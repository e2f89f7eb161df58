"""What known servers are asked to do around a snapshot. Pure.

Each preset is what its server offers for giving device memory away and taking it back. They use
the servers' development endpoints, which must be switched on in the app file; those paths are on
the gateway's list of refused ones.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise

from nagara.contract.replica import HookStep, SnapshotHooks
from nagara.control.openai_server import recognise

_CACHE = json.dumps({"tags": ["kv_cache"]})
_RELOAD = json.dumps({"method": "reload_weights"})

PRESETS: dict[str, SnapshotHooks] = {
    "none": SnapshotHooks(),
    # Any server in Python: its processes give unused memory back and renew their generators.
    "python": SnapshotHooks(in_python=True),
    # Level 1: the weights go along in host memory, the KV cache does not.
    "vllm": SnapshotHooks(
        before=(HookStep("/sleep?level=1"),), after=(HookStep("/wake_up"),), in_python=True
    ),
    # Level 2: the weights are read again from their files.
    "vllm-deep": SnapshotHooks(
        before=(HookStep("/sleep?level=2"),),
        after=(
            HookStep("/wake_up?tags=weights"),
            HookStep("/collective_rpc", body=_RELOAD),
            HookStep("/wake_up?tags=kv_cache"),
        ),
        in_python=True,
    ),
    # Nagara's own engine, on a GPU: weights released, or left where the driver carries them from.
    "nagara": SnapshotHooks(
        before=(HookStep("/sleep?weights=released"),), after=(HookStep("/wake"),), in_python=True
    ),
    "nagara-carried": SnapshotHooks(
        before=(HookStep("/sleep"),), after=(HookStep("/wake"),), in_python=True
    ),
    # Weights are released too, and come back from the copy that --enable-weights-cpu-backup keeps:
    # without that option they would come back as anything.
    "sglang": SnapshotHooks(
        before=(HookStep("/release_memory_occupation", body="{}"),),
        after=(HookStep("/resume_memory_occupation", body="{}"),),
        in_python=True,
    ),
    # The KV cache alone: weights stay on the device, and the driver carries them.
    "sglang-cache": SnapshotHooks(
        before=(HookStep("/release_memory_occupation", body=_CACHE),),
        after=(HookStep("/resume_memory_occupation", body=_CACHE),),
        in_python=True,
    ),
}

# How weights come back, where a server can do it in both ways: preset → way → preset.
WAYS: dict[str, dict[str, str]] = {
    "vllm": {"streamed": "vllm-deep", "carried": "vllm"},
    "vllm-deep": {"streamed": "vllm-deep", "carried": "vllm"},
    "nagara": {"streamed": "nagara", "carried": "nagara-carried"},
    "nagara-carried": {"streamed": "nagara", "carried": "nagara-carried"},
}


def with_weights(preset: str, way: str) -> str | None:
    """The preset that treats weights as wanted; None where its server is not known to stream.

    What is not asked to give its weights away has them carried along.
    """
    if way == "auto":
        return preset
    return WAYS.get(preset, {"carried": preset}).get(way)


def preset_of(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The preset of a command that says nothing itself: what its own options have switched on."""
    server = recognise(command)
    kind = server.kind if server is not None else ""
    if kind == "nagara" and _computes_on_gpu(command):
        return "nagara"
    if kind == "vllm":
        can_sleep = "--enable-sleep-mode" in command and env.get("VLLM_SERVER_DEV_MODE") == "1"
        return "vllm" if can_sleep else "python"
    if kind == "sglang":
        if "--enable-memory-saver" not in command:
            return "python"
        return "sglang" if "--enable-weights-cpu-backup" in command else "sglang-cache"
    return "none"


def _computes_on_gpu(command: Sequence[str]) -> bool:
    return "--device=cuda" in command or any(
        pair == ("--device", "cuda") for pair in pairwise(command)
    )
