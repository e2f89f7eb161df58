"""`nagara engine`: the LLM engine on its own, without control, node or snapshots."""

from pathlib import Path
from typing import Any

import click

from nagara.base.errors import NagaraError
from nagara.engine.openmp import be_patient


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
    "--kernel",
    type=click.Choice(["auto", "c", "torch", "transformers"]),
    default="auto",
    show_default=True,
    help="What computes; auto takes the C kernel on a CPU with a compiler.",
)
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Where."
)
@click.option(
    "--depth",
    type=click.IntRange(0, 1),
    default=1,
    show_default=True,
    help="Steps in flight beyond the one being read; 0 turns the overlap off.",
)
@click.option(
    "--pack",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    show_default=True,
    help="Repack weights for speed, at the price of a copy in memory.",
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "mapped", "streamed"]),
    default="auto",
    show_default=True,
    help="Mapped from their files, or streamed into memory that is released while asleep.",
)
@click.option(
    "--readers",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Threads that stream weights.",
)
@click.option(
    "--cache-tokens",
    type=click.IntRange(16),
    help="Size of the KV cache; by free memory if not given.",
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
    "--graphs/--no-graphs",
    "has_graphs",
    default=True,
    show_default=True,
    help="On CUDA: capture steps as graphs and replay them.",
)
@click.option(
    "--batch-invariant",
    "is_batch_invariant",
    is_flag=True,
    help="Refuse to compute with what gives a request other last bits beside other requests.",
)
@click.option(
    "--compile", "is_compiled", is_flag=True, help="Compile the model with torch.compile."
)
def serve(
    model: Path,
    port: int,
    host: str,
    served_model_name: str | None,
    **engine: Any,  # of the engine's settings, each by the name of its field
) -> None:
    """Serve the model folder MODEL with OpenAI's API."""
    be_patient()
    # torch loads in seconds: only this command pays for it
    from nagara.engine.errors import EngineError
    from nagara.engine.server import ServeSettings
    from nagara.engine.server import serve as run
    from nagara.engine.settings import EngineSettings

    try:
        run(
            ServeSettings(
                folder=model,
                port=port,
                host=host,
                model_name=served_model_name,
                engine=EngineSettings(**engine),
            )
        )
    except EngineError as error:
        raise NagaraError(error.what, where=error.where, hint=error.hint) from error
