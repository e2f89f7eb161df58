"""`nagara bench weights`: how fast weights are read, against what the machine reads at all."""

import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import click

from nagara.base.errors import NagaraError
from nagara.cli.bench_report import print_json
from nagara.cli.settings import Settings
from nagara.image.models import find_model

_HEADROOM = 2.0


@click.command()
@click.option(
    "--model",
    "names",
    multiple=True,
    help="A model's name or a folder; may be repeated.  [default: smollm2 and a random one]",
)
@click.option(
    "--readers", type=click.IntRange(1, 64), default=2, show_default=True,
    help="Threads that read.",
)  # fmt: skip
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Of each case.")
@click.option("--size-gb", type=click.FloatRange(0.01), default=2.0, show_default=True,
              help="Size of the random model.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def weights(
    state: Settings, names: tuple[str, ...], readers: int, runs: int, size_gb: float, as_json: bool
) -> None:
    """Measure streaming from the page cache and from the disk to memory."""
    from nagara.engine.bench_weights import make_random_model, run
    from nagara.engine.errors import EngineError

    with ExitStack() as stack:
        models = [(name, _folder(state, name)) for name in names or ("smollm2",)]
        if not names:
            state.state.mkdir(parents=True, exist_ok=True)
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=state.state))
            size_bytes = int(size_gb * 1e9)
            if shutil.disk_usage(scratch).free < _HEADROOM * size_bytes:
                raise NagaraError(
                    f"has no room for a random model of {size_gb:g} GB",
                    where=str(state.state),
                    hint="--size-gb, or --model for models that exist",
                )
            click.echo(f"making a random model of {size_gb:g} GB", err=True)
            models.append(("random", make_random_model(Path(scratch), size_bytes)))
        try:
            result = run(models, readers, runs, lambda text: print(text, file=sys.stderr))
        except EngineError as error:
            raise NagaraError(error.what, where=error.where, hint=error.hint) from error
    if as_json:
        print_json(result)
        return
    for case in result["cases"]:
        click.echo(
            f"{case['model']:>10} from the {case['source']:<10} {case['gb_s']:7.2f} GB/s, "
            f"{result['reference']} {case['reference_gb_s']:7.2f} GB/s: ratio {case['ratio']:.2f}"
        )


def _folder(state: Settings, name: str) -> Path:
    return Path(name) if Path(name).is_dir() else find_model(state.models_dir, name).path
