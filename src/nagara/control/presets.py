"""What known servers are asked to do around a snapshot. Pure.

Each preset is what its server offers for giving device memory away and taking it back. They use
the servers' development endpoints, which must be switched on in the app file; those paths are on
the gateway's list of refused ones.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from nagara.contract.replica import HookStep, SnapshotHooks
from nagara.control.openai_server import recognise

Weights = Literal["auto", "carried", "streamed"]

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
    "sglang": SnapshotHooks(
        before=(HookStep("/release_memory_occupation", body="{}"),),
        after=(HookStep("/resume_memory_occupation", body="{}"),),
        in_python=True,
    ),
}


def preset_of(command: Sequence[str], env: Mapping[str, str], weights: Weights = "auto") -> str:
    """The preset of a command that names none: what its own options have switched on, and what is
    to become of its weights: carried in the snapshot, or read again from their files.

    Raises:
        ValueError: the server, started like this, cannot do that with its weights; why, in words.
    """
    server = recognise(command)
    kind = server.kind if server is not None else ""
    if kind == "nagara":
        if weights == "carried":
            raise ValueError("nagara's engine maps its weights from their files: none are carried")
        return "none"
    if kind == "vllm":
        can_sleep = "--enable-sleep-mode" in command and env.get("VLLM_SERVER_DEV_MODE") == "1"
        if weights == "streamed" and not can_sleep:
            raise ValueError(
                "vLLM reads its weights again only when started with --enable-sleep-mode and, in "
                'env, VLLM_SERVER_DEV_MODE = "1"'
            )
        return ("vllm-deep" if weights == "streamed" else "vllm") if can_sleep else "python"
    if weights == "streamed":
        raise ValueError(
            "how this server drops its weights and reads them again is not known; say it in "
            "snapshot.before and snapshot.after, and leave this out"
        )
    if kind == "sglang":
        return "sglang" if "--enable-memory-saver" in command else "python"
    return "none"
