"""The app file of the demonstration and of the measurements: a model behind nagara's engine."""

import json
import sys
from collections.abc import Mapping
from typing import Any


def own_image() -> str:
    """The image of the virtual environment that this command runs in."""
    return f"venv:{sys.prefix}"


def can_be_image(facts: Mapping[str, Any]) -> bool:
    """Whether the environment can be an image on a node with these facts."""
    return facts["isolation"] == "container" and sys.prefix != sys.base_prefix


def engine_app(
    name: str,
    model: str,
    *,
    image: str = "host",
    snapshot: bool = True,
    compile_cache: str | None = None,
    max_replicas: int = 4,
) -> str:
    """The text of an app file with one app.

    Args:
        image: as in an app file.
        snapshot: whether it may be saved and restored.
        compile_cache: compile the model's forward pass, with the compiler's files in this folder
            of the replica; None runs it as it is.
    """
    command = ["nagara", "engine", "serve", f"/models/{model}", "--port", "${PORT}"]
    lines = [
        f"[app.{name}]",
        f"image    = {json.dumps(image)}",
        f'models   = ["{model}"]',
        f"command  = {json.dumps([*command, '--compile'] if compile_cache else command)}",
        'ready    = "/health"',
        f'scale    = {{min = 0, max = {max_replicas}, concurrency = 8, idle = "10m"}}',
        f"snapshot = {json.dumps(snapshot)}",
        'timeouts = {start = "15m"}',
    ]
    if compile_cache:
        folders = {"TORCHINDUCTOR_CACHE_DIR": compile_cache, "TRITON_CACHE_DIR": compile_cache}
        env = ", ".join(f"{key} = {json.dumps(value)}" for key, value in folders.items())
        lines.append(f"env      = {{{env}}}")
    return "\n".join(lines) + "\n"
