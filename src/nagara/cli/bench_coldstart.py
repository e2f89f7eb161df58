"""`nagara bench coldstart`: from a request's sending to its first token, app not running.

Four kinds of start of one app, in turn, so that what changes on the machine changes for all:

    plain_cold      nothing cached: no page of it, no compiled code
    plain_warm      page cache warm and, where the app compiles, the compiler's cache too
    restored_cold   from a snapshot, page cache emptied
    restored_warm   from a snapshot

The page cache is emptied through the kernel (root); how much each start then read from disk is
printed beside it. Every answer is compared with every other.

`--app small` measures a server that starts in a fraction of a second, where a restore gains
little or loses. `--app vllm` measures vLLM's OpenAI server, which compiles by default: its
environment is looked for where `--python` says.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console
from rich.table import Table

from nagara.base.errors import NagaraError, UsageError
from nagara.base.spans import STAGES
from nagara.cli import page_cache
from nagara.cli.bench_report import print_json, report, spread
from nagara.cli.example_app import can_be_image, engine_app, own_image, small_app, vllm_app
from nagara.cli.instance import Instance, own_instance
from nagara.cli.settings import Settings

QUESTION = "What is the capital of France?"
_MAX_TOKENS = 16
_VLLM_MODEL = "smollm2"
_CAPTURE_S = 3600.0  # a start that compiles is part of it
_STAGES = (*STAGES, "unaccounted")

_progress = Console(stderr=True)


@dataclass(slots=True)
class Kind:
    """One kind of start: which app to ask, and how the cache is."""

    name: str
    app: str
    start_kind: str
    is_cold: bool
    first_token_s: list[float] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """Medians over the runs. `first_token_after_ready_s` is what follows the start."""
        stages = {name: self._median(name) for name in _STAGES}
        totals = [start["total_s"] for start in self.starts]
        after = [whole - total for whole, total in zip(self.first_token_s, totals, strict=True)]
        return {
            **spread(self.first_token_s),
            "stages": stages,
            "host": self._host_parts(),
            "start_s": round(statistics.median(totals), 4),
            "first_token_after_ready_s": round(statistics.median(after), 4),
            "read_from_disk_bytes": int(statistics.median(self.disk_bytes)),
        }

    def _median(self, stage: str) -> float:
        return round(statistics.median(float(s["stages"][stage]) for s in self.starts), 4)

    def _host_parts(self) -> dict[str, float] | None:
        """What the host stage of restored starts consists of; None for plain ones."""
        parts: list[dict[str, float]] = [start["host"] for start in self.starts if start["host"]]
        if not parts:
            return None
        return {
            name: round(statistics.median(of_start[name] for of_start in parts), 4)
            for name in parts[0]
        }


@click.command()
@click.option(
    "--app",
    default="smollm2",
    show_default=True,
    help="A model that was added, `vllm`, or `small`: a server that needs no time to start.",
)
@click.option(
    "--runs", default=5, show_default=True, type=click.IntRange(min=1), help="Of each case."
)
@click.option(
    "--image",
    type=click.Choice(["host", "venv"]),
    default="host",
    show_default=True,
    help="This machine's own tree, or an image of this command's environment.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile the model's forward pass.")
@click.option("--eager", is_flag=True, help="Let vLLM run without compiling.")
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Interpreter of vLLM's environment  [default: vllm/bin/python in "
    "$NAGARA_ENVIRONMENTS, or else in STATE/environments]",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@click.pass_obj
def coldstart(
    settings: Settings,
    app: str,
    runs: int,
    image: str,
    compiled: bool,
    eager: bool,
    python: Path | None,
    as_json: bool,
) -> None:
    """From a request to the first token, started plainly and restored."""
    if image != "host" and (compiled or app in ("vllm", "small")):
        raise UsageError(
            "is for the engine as it is: compilers and vLLM's environment are this machine's",
            where="--image venv",
            hint="use --image host",
        )
    server: Server
    if app == "small":
        server = _Small()
    elif app == "vllm":
        if compiled:
            raise UsageError("vLLM compiles by default; --eager measures it without")
        made = Path(os.environ.get("NAGARA_ENVIRONMENTS", settings.state / "environments"))
        server = _Vllm(python or made / "vllm/bin/python", eager)
    else:
        if eager or python is not None:
            raise UsageError("--eager and --python are for --app vllm")
        server = _Engine(app, compiled, image)
    if not page_cache.can_drop():
        raise NagaraError(
            "a cold start cannot be measured: the page cache cannot be emptied",
            where="/proc/sys/vm/drop_caches",
            hint="run as root, outside a container",
        )
    with own_instance(settings.state, "bench") as instance:
        facts = instance.admin.status()
        if not facts["can_snapshot"]:
            raise NagaraError(
                "this machine cannot save replicas", hint="missing: " + "; ".join(facts["missing"])
            )
        if image == "venv" and not can_be_image(facts):
            raise UsageError("--image venv needs a virtual environment and containers")
        figures = _measure(instance, server, runs)
    if as_json:
        print_json(figures)
    else:
        Console().print(_table(report(figures)))


class Server(Protocol):
    """A kind of server that is measured."""

    @property
    def model(self) -> str:
        """The model it serves."""
        ...

    @property
    def compiles(self) -> bool:
        """Whether a start begins with compiling."""
        ...

    def app(self, name: str, *, snapshot: bool = True, compile_cache: str | None) -> str:
        """The text of an app file."""
        ...

    def figures(self) -> dict[str, Any]:
        """What it is, for the result."""
        ...


@dataclass(frozen=True, slots=True)
class _Engine:
    model: str
    compiles: bool
    image: str  # "host" or "venv"

    def app(self, name: str, *, snapshot: bool = True, compile_cache: str | None) -> str:
        image = own_image() if self.image == "venv" else self.image
        return engine_app(
            name, self.model, image=image, snapshot=snapshot, compile_cache=compile_cache
        )

    def figures(self) -> dict[str, Any]:
        return {"app": self.model, "image": self.image, "compile": self.compiles}


@dataclass(frozen=True, slots=True)
class _Small:
    model: str = "small"
    compiles: bool = False

    def app(self, name: str, *, snapshot: bool = True, compile_cache: str | None) -> str:
        return small_app(name, snapshot=snapshot)

    def figures(self) -> dict[str, Any]:
        return {"app": "small", "image": "host", "compile": False}


@dataclass(frozen=True, slots=True)
class _Vllm:
    python: Path
    is_eager: bool
    model: str = _VLLM_MODEL

    def __post_init__(self) -> None:
        if not self.python.exists():
            raise NagaraError(
                "there is no environment with vLLM",
                where=str(self.python),
                hint="scripts/environments.py vllm makes one; --python names another",
            )

    @property
    def compiles(self) -> bool:
        return not self.is_eager

    def app(self, name: str, *, snapshot: bool = True, compile_cache: str | None) -> str:
        return vllm_app(
            name,
            self.model,
            self.python.absolute(),
            snapshot=snapshot,
            compile_cache=compile_cache,
            eager=self.is_eager,
        )

    def figures(self) -> dict[str, Any]:
        mode = "eager" if self.is_eager else "default"
        return {
            "app": "vllm",
            "image": "host",
            "model": self.model,
            "mode": mode,
            "compile": self.compiles,
        }


def _measure(instance: Instance, server: Server, runs: int) -> dict[str, Any]:
    answers: set[str] = set()
    with _compile_caches() if server.compiles else nullcontext((None, None)) as (cold, warm):
        apps = {
            "cold": server.app("plain-cold", snapshot=False, compile_cache=cold),
            "warm": server.app("plain-warm", snapshot=False, compile_cache=warm),
            "saved": server.app("restored", compile_cache=cold),
        }
        _progress.print("deploying")
        instance.admin.deploy("".join(apps.values()), "coldstart")
        if warm is not None:
            _fill_compile_cache(instance, server.model, Path(warm))
        capture = _capture(instance, server.model)
        kinds = (
            Kind("plain_cold", "plain-cold", "plain", is_cold=True),
            Kind("plain_warm", "plain-warm", "plain", is_cold=False),
            Kind("restored_cold", "restored", "restored", is_cold=True),
            Kind("restored_warm", "restored", "restored", is_cold=False),
        )
        for run in range(runs):
            for kind in kinds:
                answers.add(_one_start(instance, kind, server.model))
                _progress.print(f"run {run + 1}/{runs}: {kind.name} {kind.first_token_s[-1]:.2f} s")
    figures = {kind.name: kind.figures() for kind in kinds}
    return {
        **server.figures(),
        "runs": runs,
        "answers_equal": len(answers) == 1,
        "snapshot_bytes": capture["memory_bytes"] + capture["layer_bytes"],
        "capture_s": round(float(capture["elapsed_s"]), 2),
        "kinds": figures,
        "ratios": {
            heat: _ratio(figures[f"plain_{heat}"], figures[f"restored_{heat}"])
            for heat in ("cold", "warm")
        },
    }


def _ratio(plain: dict[str, Any], restored: dict[str, Any]) -> float:
    return round(float(plain["median_s"]) / float(restored["median_s"]), 2)


def _one_start(instance: Instance, kind: Kind, model: str) -> str:
    """Makes the app start for a request, checks that it did so in this way, and folds it."""
    if kind.is_cold:
        page_cache.drop()
    before = page_cache.read_from_disk_bytes()
    reply = instance.chat(kind.app, model, QUESTION, max_tokens=_MAX_TOKENS)
    kind.disk_bytes.append(page_cache.read_from_disk_bytes() - before)
    start = instance.last_start(kind.app)
    if start["replica"] != reply.replica or start["kind"] != kind.start_kind:
        raise NagaraError(
            f"expected a {kind.start_kind} start, got {start['kind']}: {start['fallback']}",
            where=kind.name,
        )
    kind.first_token_s.append(reply.first_token_s)
    kind.starts.append(start)
    instance.admin.fold(kind.app)
    return reply.text


def _capture(instance: Instance, model: str) -> dict[str, Any]:
    _progress.print("making the snapshot")
    instance.chat("restored", model, QUESTION, max_tokens=_MAX_TOKENS)
    capture = instance.admin.wait_for_capture("restored", timeout_s=_CAPTURE_S)
    if capture["state"] != "done":
        raise NagaraError(f"no snapshot was made: {capture['reason']}")
    instance.admin.fold("restored")
    return capture


@contextmanager
def _compile_caches() -> Iterator[tuple[str, str]]:
    """Two folders for compiled code: one that replicas find empty, one kept on the machine.

    A replica sees the machine's own tree, and what it writes stays in its own layer. So a folder
    that this machine does not have is empty at every start, and one that it has is as filled.
    """
    kept = Path(tempfile.mkdtemp(prefix="nagara-bench-", dir="/var/cache"))
    try:
        yield f"{kept}-absent", str(kept)
    finally:
        shutil.rmtree(kept)


def _fill_compile_cache(instance: Instance, model: str, kept: Path) -> None:
    """Lets one replica compile and copies what it wrote to the machine's folder."""
    _progress.print("filling the compiler's cache")
    reply = instance.chat("plain-warm", model, QUESTION, max_tokens=_MAX_TOKENS)
    written = instance.state / "node/replicas" / reply.replica / "root" / kept.relative_to("/")
    shutil.copytree(written, kept, dirs_exist_ok=True)
    instance.admin.fold("plain-warm")


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"{figures['app']}: request sent → first token, {figures['runs']} runs")
    for column in ("start", "median", "min", "max", *_STAGES, "first token", "from disk"):
        table.add_column(column, justify="left" if column == "start" else "right")
    for name, kind in figures["kinds"].items():
        table.add_row(
            name,
            *(f"{kind[key]:.2f} s" for key in ("median_s", "min_s", "max_s")),
            *(f"{kind['stages'][stage] * 1000:.0f} ms" for stage in _STAGES),
            f"{kind['first_token_after_ready_s'] * 1000:.0f} ms",
            f"{kind['read_from_disk_bytes'] / 1e6:.0f} MB",
        )
    ratios = figures["ratios"]
    table.caption = "".join(_host_line(name, kind) for name, kind in figures["kinds"].items()) + (
        f"restored is {ratios['warm']} times faster warm, {ratios['cold']} times cold; "
        f"answers {'equal' if figures['answers_equal'] else 'DIFFER'}; "
        f"snapshot {figures['snapshot_bytes'] / 1e6:.0f} MB"
    )
    return table


def _host_line(name: str, kind: dict[str, Any]) -> str:
    if kind["host"] is None:
        return ""
    parts = [f"{part} {seconds * 1000:.0f} ms" for part, seconds in kind["host"].items()]
    return f"host of {name}: {', '.join(parts)}\n"
