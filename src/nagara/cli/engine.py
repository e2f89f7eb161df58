"""`nagara engine`: the LLM engine on its own, without control, node or snapshots."""

from pathlib import Path

import click

from nagara.base.errors import NagaraError


@click.group()
def engine() -> None:
    """Run the LLM engine."""


@engine.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(1, 65535), required=True, help="TCP port to serve on.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to serve on.")
@click.option("--served-model-name", help="Name clients ask for; the folder's name if not given.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "bfloat16", "float32"]),
    default="auto",
    show_default=True,
    help="Type to compute in; auto is the stored one, so that weights stay mapped from the file.",
)
@click.option(
    "--max-concurrency",
    type=click.IntRange(1, 1024),
    default=16,
    show_default=True,
    help="Requests computed at once; more wait their turn.",
)
@click.option("--context", type=click.IntRange(2), help="Longest context; at most the model's own.")
@click.option(
    "--compile", "is_compiled", is_flag=True, help="Compile the model with torch.compile."
)
def serve(
    model: Path,
    port: int,
    host: str,
    served_model_name: str | None,
    dtype: str,
    max_concurrency: int,
    context: int | None,
    is_compiled: bool,
) -> None:
    """Serve the model folder MODEL with OpenAI's API."""
    # torch loads in seconds: only this command pays for it
    from nagara.engine.engine import EngineSettings
    from nagara.engine.errors import EngineError
    from nagara.engine.server import ServeSettings
    from nagara.engine.server import serve as run

    try:
        run(
            ServeSettings(
                folder=model,
                port=port,
                host=host,
                model_name=served_model_name,
                engine=EngineSettings(
                    dtype=dtype,
                    max_concurrency=max_concurrency,
                    context=context,
                    is_compiled=is_compiled,
                ),
            )
        )
    except EngineError as error:
        raise NagaraError(error.what, where=error.where, hint=error.hint) from error
