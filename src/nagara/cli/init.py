"""`nagara init`: writes a commented app file, by flags or by asking three things."""

import json
import shlex
import sys
from pathlib import Path

import click

from nagara.base.errors import UsageError
from nagara.cli.settings import Settings
from nagara.control.appfile import parse_apps
from nagara.image.models import list_models

_ENGINE = "nagara engine serve /models/{model} --port ${{PORT}}"

_TEMPLATE = """\
# An app for nagara. Deploy it with: nagara deploy {file}
# All keys: docs/apps.md. Durations are written "30s", "10m"; sizes "512MB", "8GiB".

[app.{name}]
image   = {image}
# What a replica sees as its files: "host" is this machine's own tree, read-only. Others:
# "venv:/srv/app/.venv", "dir:/srv/tree", "oci:/srv/layout:v1", "registry:HOST/NAME:TAG".
{models}
command = {command}
# ${{PORT}} stands for the port that the server has to listen on.
port    = {port}
ready   = {ready}                 # answers 200 once the server can serve; "/" for many
scale   = {{min = 0, max = 4, concurrency = 8, idle = "auto"}}
# From zero to `max` replicas; each is given `concurrency` requests at a time.

# env      = {{LOG_LEVEL = "info"}}
# limits   = {{cpu = 2, memory = "8GiB"}}          # of each replica
# timeouts = {{start = "10m", request = "10m", queue = "auto"}}
# snapshot = false                               # always start from the beginning
"""


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default="nagara.toml")
@click.option("--name", help="Of the app  [default: asked for].")
@click.option("--command", help="The server's command, as in a shell, with ${PORT}  [asked for].")
@click.option("--model", "models", multiple=True, help="A model to show it; may be repeated.")
@click.option("--image", default=None, help='As in an app file  [asked for; "host"].')
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True,
              help="Where the server listens.")  # fmt: skip
@click.option("--ready", default="/health", show_default=True, help="Answers 200 when it serves.")
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.pass_obj
def init(
    settings: Settings,
    file: Path,
    name: str | None,
    command: str | None,
    models: tuple[str, ...],
    image: str | None,
    port: int,
    ready: str,
    force: bool,
) -> None:
    """Write a commented app file to begin with  [FILE default: nagara.toml].

    What no flag says is asked for: name, command, image.
    """
    if file.exists() and not force:
        raise UsageError("is there already", where=str(file), hint="--force replaces it")
    known = [model.name for model in list_models(settings.models_dir)]
    name = name or _ask("--name", "name of the app", models[0] if models else "smol")
    if command is None and models:
        command = _ENGINE.format(model=models[0])
    default = _ENGINE.format(model=known[0]) if known else None
    command = command or _ask("--command", "command of its server", default)
    image = image or ("host" if not sys.stdin.isatty() else _ask("--image", "image", "host"))
    shown = models or tuple(model for model in known if f"/models/{model}" in command)
    text = _TEMPLATE.format(
        file=file, name=name, image=json.dumps(image), port=port, ready=json.dumps(ready),
        command=json.dumps(shlex.split(command)), models=_models_line(shown),
    )  # fmt: skip
    parse_apps(text, str(file))
    file.write_text(text)
    click.echo(f"{file} written; next: nagara deploy {file}")


def _ask(flag: str, what: str, default: str | None) -> str:
    """Asks where somebody can answer; else the flag is needed."""
    if not sys.stdin.isatty():
        if default is not None:
            return default
        raise UsageError(f"the {what} is not known", hint=f"say it with {flag}")
    answer: str = click.prompt(what, default=default, err=True)
    return answer


def _models_line(models: tuple[str, ...]) -> str:
    if not models:
        return '# models  = ["smollm2"]           # shown at /models/smollm2; see: nagara models ls'
    places = ", ".join(f"/models/{model}" for model in models)
    return f"models  = {json.dumps(list(models))}  # shown at {places}"
