"""`nagara demo`: the main job, once, on a real model.

A nagara of its own is brought up, and ends with the demonstration. The model must have been
added (`make demo` does that).
"""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from nagara.base.errors import NagaraError
from nagara.base.units import format_bytes
from nagara.cli.deploy import imports_shown
from nagara.cli.example_app import can_be_image, engine_app, own_image
from nagara.cli.instance import Instance, Reply, own_instance
from nagara.cli.settings import Settings
from nagara.cli.waterfall import waterfall
from nagara.image.models import find_model

_QUESTION = "What is the capital of France? Answer in one short sentence."
_MORE = (
    "Name a primary colour.",
    "What is 2 + 3?",
    "Which animal says meow?",
    "What do bees make?",
)
_APP = "smollm2"
_MAX_TOKENS = 24
_CAPTURE_S = 600.0

_console = Console(highlight=False)


@click.command()
@click.pass_obj
def demo(settings: Settings) -> None:
    """Show a cold start, a snapshot and a restored start."""
    settings.state.mkdir(parents=True, exist_ok=True)
    find_model(settings.models_dir, _APP)
    with ExitStack() as stack:
        with _step("bringing nagara up"):
            instance = stack.enter_context(own_instance(settings.state, "demo"))
        _run(instance)
        with _step("folding everything away"):
            stack.close()
    _how_to_go_on(settings)


def _step(what: str) -> Any:
    """Progress while something works; where no terminal is, a line before it."""
    if not _console.is_terminal:
        _console.print(f"... {what}")
    return _console.status(what)


def _run(instance: Instance) -> None:
    facts = instance.admin.status()
    _deploy(instance, facts)
    _console.print(f"[bold]you:[/] {escape(_QUESTION)}")
    with _step("a plain start: the server's whole initialisation"):
        first = instance.chat(_APP, _APP, _QUESTION, max_tokens=_MAX_TOKENS)
    plain = _answered(instance, first)
    _show_files(plain)
    if facts["can_snapshot"]:
        with _step("making a snapshot, with a replica that never serves"):
            capture = instance.admin.wait_for_capture(_APP, timeout_s=_CAPTURE_S)
        if capture["state"] != "done":
            raise NagaraError(f"no snapshot was made: {capture['reason']}")
        size = format_bytes(capture["memory_bytes"] + capture["layer_bytes"])
        _console.print(f"snapshot: {size}, made in {capture['elapsed_s']:.1f} s")
    else:
        for gap in facts["missing"]:
            _console.print(f"[yellow]without[/] {escape(gap)}")
    with _step("folding the app to zero"):
        instance.admin.fold(_APP)
    _console.print(f"folded to zero\n[bold]you:[/] {escape(_QUESTION)}")
    with _step("nothing is running: starting again"):
        second = instance.chat(_APP, _APP, _QUESTION, max_tokens=_MAX_TOKENS)
    again = _answered(instance, second)
    if first.text != second.text:
        raise NagaraError(f"the answers differ: {first.text!r} and {second.text!r}")
    _console.print("\n[bold]where the time went[/] (both answers are equal)")
    _console.print(waterfall((plain, again)))
    if again["kind"] == "restored":
        ratio = first.first_token_s / second.first_token_s
        _console.print(
            f"request sent → first token: {first.first_token_s:.2f} s plain, "
            f"{second.first_token_s:.2f} s restored: [bold green]{ratio:.1f} times faster[/]"
        )
    elif facts["can_snapshot"]:
        raise NagaraError(f"the second start was not a restored one: {again['fallback']}")
    _at_once(instance)


def _deploy(instance: Instance, facts: dict[str, Any]) -> None:
    """The app of an image that has this command's own environment in it, where images can be."""
    if not can_be_image(facts):
        instance.admin.deploy(engine_app(_APP, _APP), "demo")
        return
    begun_s = time.monotonic()
    _console.print("bringing the Python environment and the model into the store as images")
    with imports_shown(instance.admin):
        instance.admin.deploy(engine_app(_APP, _APP, image=own_image()), "demo")
    _console.print(f"image: {own_image()}, in the store after {time.monotonic() - begun_s:.1f} s")


def _show_files(start: dict[str, Any]) -> None:
    """How much of the image the first start has read."""
    files = start["files"]
    if not files:
        return
    # All of it is here: only the first of all starts was counted.
    which = "read" if files["read_bytes"] is not None else "recorded"
    if files[f"{which}_bytes"] is not None:
        _console.print(
            f"until it was ready it read [bold]{format_bytes(files[f'{which}_bytes'])}[/] of the "
            f"{format_bytes(files['size_bytes'])} in image and model "
            f"({files[f'{which}_objects']} of {files['objects']} objects)"
            + ("" if which == "read" else ", by an earlier count")
        )


def _answered(instance: Instance, reply: Reply) -> dict[str, Any]:
    start = instance.last_start(_APP)
    _console.print(
        f"[bold]{_APP}:[/] {escape(reply.text.strip())}  "
        f"[dim]({start['kind']} start, first token after {reply.first_token_s:.2f} s)[/]"
    )
    return start


def _at_once(instance: Instance) -> None:
    """Four requests together, from zero."""
    instance.admin.fold(_APP)
    _console.print(f"\nfolded to zero again, then {len(_MORE)} requests at once:")
    with _step("starting"), ThreadPoolExecutor(len(_MORE)) as pool:
        asked = [pool.submit(instance.chat, _APP, _APP, q, max_tokens=_MAX_TOKENS) for q in _MORE]
        replies = [request.result() for request in asked]
    for question, reply in zip(_MORE, replies, strict=True):
        answer = " ".join(reply.text.split())
        _console.print(
            f"  {escape(question)} [bold]{escape(answer)}[/] "
            f"[dim](first token after {reply.first_token_s:.2f} s)[/]"
        )


def _how_to_go_on(settings: Settings) -> None:
    command = f"{sys.argv[0]} --state {settings.state}"
    text = f"""
[bold]how to go on[/]
  {command} up examples/{_APP}.toml

It prints its address and an API key. Then, in another terminal, with that key in KEY:

  curl http://127.0.0.1:8080/{_APP}/v1/chat/completions \\
    -H "Authorization: Bearer $KEY" -H "Content-Type: application/json" \\
    -d '{{"max_tokens": 50, "messages": \\[{{"role": "user", "content": "Hello"}}]}}'

  OpenAI(base_url="http://127.0.0.1:8080/v1", api_key=KEY).chat.completions.create(
    model="{_APP}", max_tokens=50, messages=\\[{{"role": "user", "content": "Hello"}}])
"""
    _console.print(text, soft_wrap=True)
