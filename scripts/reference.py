"""The reference pages of the documents, made from the code.

    python scripts/reference.py FOLDER    writes them there

`mkdocs build` makes them by `scripts/mkdocs_hooks.py`. Whatever the code has and nobody has
described is a `MissingWordsError`: an option, an app file's key, a variable, a metric, a route.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import nagara
from nagara.base.clock import SystemClock
from nagara.cli.command_examples import EXAMPLES
from nagara.cli.errors_list import all_kinds, all_messages
from nagara.cli.exit_codes import EXIT_CODES
from nagara.cli.main import main as root_command
from nagara.contract.machine import Offering
from nagara.control import appfile, openapi, replicas
from nagara.control.api import Api
from nagara.control.figures_api import disk_text
from nagara.control.metrics import Histogram
from nagara.control.occupancy import Use
from nagara.control.telemetry import Telemetry
from nagara.control.watch_api import WatchApi
from nagara.engine import metrics as engine_metrics
from nagara.engine.engine import EngineStats
from nagara.pool import figures, poolfile
from nagara.pool import states as machine_states
from nagara.pool.machines import Machine
from nagara.snapshot import states as device_states
from nagara.store import configured

ROOT = Path(__file__).parent.parent
_SOURCE = Path(nagara.__file__).parent

# Variables of the environment that nagara reads or gives to replicas.
VARIABLES = {
    "NAGARA_STATE": "the state folder, as `--state`",
    "NAGARA_ENGINE_CACHE": "where the engine keeps the kernels it compiled",
    "NAGARA_CPU_LEVEL": "the CPU that the engine's kernel is compiled for; given to apps whose "
    "snapshot is to reach lesser machines",
    "NAGARA_REPLICA": "given to replicas: their name",
    "NAGARA_REPLICA_TOKEN": "for an engine without nagara: the token for `/sleep` and `/wake`",
    "NAGARA_REPLICA_TOKEN_FILE": "given to replicas: the file with their own token",
    "NAGARA_ENVIRONMENTS": "the folder of the environments of servers that are measured and tested",
    "NAGARA_HOOK_SOCKET": "given to replicas: where their processes listen for snapshot hooks",
    "NAGARA_FAULT_FILE": "for tests: a file that says at which moment a process is to fail",
    "NAGARA_DATABASE": "where the state is kept, as `nagara up --database`",
    "NAGARA_LOG_FORMAT": "`text` or `json`, as `--log-format`",
    "NAGARA_TENANT": "given to the command that reads a tenant's key: whose key",
    "REGISTRY_PASSWORD": "the password for `nagara image import --user`",
    "XDG_STATE_HOME": "the folder of the state folder, for users other than root",
    "XDG_CACHE_HOME": "the folder of the engine's cache",
}


class MissingWordsError(Exception):
    """Something the code has is described nowhere."""


# -- the command line --------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its options and an example."""
    parts = ["# Commands\n", "Exit codes:\n", "| code | when |\n|---|---|"]
    parts += [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    for words, command, ctx in _commands(root_command, click.Context(root_command), ""):
        parts.append(_command(words, command, ctx))
    return "\n".join(parts) + "\n"


def _commands(
    group: click.Group, ctx: click.Context, words: str
) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        path = f"{words} {name}".strip()
        inner = click.Context(command, info_name=name, parent=ctx)
        if isinstance(command, click.Group):
            yield from _commands(command, inner, path)
            if not command.invoke_without_command:
                continue
        yield path, command, inner


def _command(words: str, command: click.Command, ctx: click.Context) -> str:
    if words not in EXAMPLES:
        raise MissingWordsError(f"`nagara {words}` has no example")
    usage = " ".join(command.collect_usage_pieces(ctx))
    lines = [f"\n## nagara {words}\n", f"`nagara {words} {usage}`\n"]
    lines += [_escape(inspect.cleandoc(command.help or "").replace("\b\n", "")), ""]
    rows = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    if rows:
        lines += ["| option | what |", "|---|---|"]
        lines += [_option(words, option) for option in rows]
    lines += ["", "```console", f"$ {EXAMPLES[words]}", "```"]
    return "\n".join(lines)


def _option(words: str, option: click.Option) -> str:
    if not option.help:
        raise MissingWordsError(f"`nagara {words} {option.opts[-1]}` has no help")
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    kind = "" if option.is_flag else f"`{option.make_metavar(click.Context(root_command))}`"
    default = option.default if option.show_default else None
    shown = "" if default in (None, False, ()) else f" [default: {default}]"
    return f"| {names} {_escape(kind)} | {_escape(option.help + shown)} |"


# -- the app file ------------------------------------------------------------------------------


def app_file_page() -> str:
    """Every key of the app file with its type and default, in the words of the page on apps."""
    words = _words_of(ROOT / "docs" / "apps.md")
    lines = [
        "# Keys of the app file\n",
        "All below `[app.NAME]`; [apps](../apps.md) explains them.\n",
    ]
    lines += ["| key | type | default | what |", "|---|---|---|---|"]
    for key, info in _keys(appfile._AppTable, ""):
        said = words.get(key)
        if said is None:
            raise MissingWordsError(f"docs/apps.md does not describe the key {key}")
        default = "required" if info.is_required() else _default(info)
        said = re.sub(r"\]\((\w+\.md)", r"](../\1", said.replace("](#", "](apps.md#"))
        lines.append(f"| `{key}` | {_escape(_type(info))} | {default} | {said} |")
    return "\n".join(lines) + "\n"


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = _table_in(info.annotation)
        if inner is None or name in ("snapshot", "canary", "before", "after"):
            yield key, info
        if inner is not None and name not in ("canary", "before", "after"):
            yield from _keys(inner, f"{key}.")


def _table_in(annotation: Any) -> type[BaseModel] | None:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, BaseModel):
            return each
    return None


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    if value in (None, [], {}):
        is_auto = any(one.__name__ == "_duration_or_auto" for one in _functions(info))
        return '`"auto"`' if is_auto else "none"
    if isinstance(value, float) and any(one.__name__ == "_duration" for one in _functions(info)):
        return f'`"{value / 60:g}m"`'
    return f"`{json.dumps(value)}`" if isinstance(value, str | int | float | bool) else "none"


_WRITTEN = {  # what a person writes where a function reads it
    "_duration": 'duration as `"10m"`',
    "_duration_or_auto": 'duration or `"auto"`',
    "_size": 'size as `"8GiB"`',
}
_TYPES = {"str": "text", "int": "number", "float": "number", "bool": "true or false"}


def _type(info: FieldInfo) -> str:
    texts = [getattr(one, "__name__", "") for one in _functions(info)]
    for name in texts:
        if name in _WRITTEN:
            return _WRITTEN[name]
    bounds = {type(one).__name__: one for one in info.metadata}
    text = _plain(info.annotation)
    if "Ge" in bounds and "Le" in bounds:
        text += f" from {bounds['Ge'].ge} to {bounds['Le'].le}"
    return text


def _functions(info: FieldInfo) -> Iterator[Any]:
    for one in (*info.metadata, *(m for a in get_args(info.annotation) for m in get_args(a))):
        if hasattr(one, "func"):
            yield one.func


def _plain(annotation: Any) -> str:
    """A type in words."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{each}"`' for each in inside)
    if origin is Annotated:
        return _plain(inside[0])
    if origin is list:
        return f"list of {_plain(inside[0])}"
    if origin is dict:
        return "table"
    if inside:
        return " or ".join(_plain(each) for each in inside if each is not type(None))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    name: str = annotation.__name__
    return _TYPES.get(name, name)


def _words_of(page: Path) -> dict[str, str]:
    """What a page's tables say of each key: the first column may name several."""
    words: dict[str, str] = {}
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) >= 2 and cells[0].startswith("`"):
            for key in re.findall(r"`([^`]+)`", cells[0]):
                words.setdefault(key, cells[-1])
    return words


# -- settings ----------------------------------------------------------------------------------


def settings_page() -> str:
    """The other files that are read, and variables of the environment."""
    found = set()
    for file in _SOURCE.rglob("*.py"):
        found |= set(
            re.findall(r'"(NAGARA_[A-Z_]+|REGISTRY_PASSWORD|XDG_\w+_HOME)"', file.read_text())
        )
    if found - VARIABLES.keys():
        raise MissingWordsError(f"undescribed variables: {sorted(found - VARIABLES.keys())}")
    lines = [
        "# Settings\n",
        "## Variables of the environment\n",
        "| variable | what |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {VARIABLES[name]} |" for name in sorted(found)]
    lines += ["\n## The store: `STATE/store/settings.json`\n", *_docstring(configured, "json")]
    for kind, keys in configured._KEYS.items():
        named = ", ".join(f"`{key}`" for key in sorted(keys | configured._CODING_KEYS))
        lines.append(f"- a tier of the kind `{kind}` may have {named}")
    lines += ["\n## The pool's file\n", *_docstring(poolfile, "toml")]
    for key, (least, most) in poolfile._RANGES.items():
        lines.append(f"- `{key}`: {least} to {most}")
    return "\n".join(lines) + "\n"


def _docstring(module: Any, kind: str) -> list[str]:
    return [f"```{kind if kind == 'toml' else 'text'}", inspect.cleandoc(module.__doc__), "```\n"]


# -- metrics -----------------------------------------------------------------------------------


def metrics_page() -> str:
    """Every metric with its kind and meaning, from the very text that Prometheus reads."""
    lines = ["# Metrics\n"]
    for title, text in (("Nagara's own, at `/metrics` with the admin token", control_metrics()),
                        ("Of nagara's engine, at its `/metrics`", engine_text())):  # fmt: skip
        lines += [f"## {title}\n", "| metric | kind | what |", "|---|---|---|"]
        lines += [f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in exposed(text)]
        lines.append("")
    return "\n".join(lines)


def exposed(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, kind, meaning) of what a text of Prometheus's format exposes."""
    meanings = dict(re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (.+)$", text, re.MULTILINE))
    names = {re.sub(r"_(bucket|sum|count)$", "", name) if re.sub(r"_(bucket|sum|count)$", "", name)
             in kinds else name
             for name in re.findall(r"^(\w+)(?:\{.*\})? \S+$", text, re.MULTILINE)}  # fmt: skip
    for name in sorted(names | kinds.keys()):
        if name not in meanings or name not in kinds:
            raise MissingWordsError(f"the metric {name} says neither what it is nor its kind")
        yield name, kinds[name], meanings[name]


def control_metrics() -> str:
    """What `/metrics` answers once everything has been counted, and an app has been served."""
    telemetry = Telemetry(SystemClock())
    for one in vars(telemetry.metrics).values():
        labels = ["x"] * len(one.labels)
        one.add(*labels, seconds=1.0) if isinstance(one, Histogram) else one.add(*labels)
    service: Any = SimpleNamespace(
        app=SimpleNamespace(name="x"), replicas={"x": None},
        strain=SimpleNamespace(shares=lambda replica: {"cpu": 0.5}),
        by_state=lambda: {replicas.ReplicaState.READY: 1},
        dispatcher=SimpleNamespace(held=1, demand=SimpleNamespace(now=1)),
    )  # fmt: skip
    telemetry.occupancy.begin("x", "x", Use.BUSY, 0.0)
    pool = figures.Figures(0, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)
    offering = Offering("m", "p", "r", "h100", 8, 0.0)
    machine = Machine("MACHINE", offering, machine_states.MachineState.READY, 1, 0.0)
    machines = figures.machine_metrics([machine])
    disk = {"limit_bytes": 1, "parts": {"logs": 1}, "removed": {"log": 1}}
    own = telemetry.text([service]) + disk_text(disk)
    return own + figures.metrics(pool) + machines


def engine_text() -> str:
    """What the engine's `/metrics` answers after one request."""
    fields = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    counted = engine_metrics.ServerMetrics()
    counted.count_request(200)
    return counted.text(EngineStats(**fields))  # type: ignore[arg-type]


# -- the API, errors, state tables -------------------------------------------------------------


def api_document() -> dict[str, Any]:
    """The OpenAPI document of the admin API."""
    none: Any = None
    api = Api(none, none, none, none, none, none, none, WatchApi(none, none))
    return openapi.document(api.routes)


def api_page() -> str:
    """The routes in words."""
    lines = ["# The admin API\n",
             "With `Authorization: Bearer` and the content of `admin.token`; the same as an "
             "OpenAPI document: [openapi.json](openapi.json), or `GET /api/openapi`.\n",
             "| request | what |", "|---|---|"]  # fmt: skip
    for path, methods in api_document()["paths"].items():
        for method, operation in methods.items():
            if not operation["description"]:
                raise MissingWordsError(f"{method.upper()} {path} is described nowhere")
            lines.append(f"| `{method.upper()} {path}` | {_escape(operation['description'])} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Kinds of errors, the gateway's refusals, and every message."""
    lines = ["# Errors\n", "| kind | room | exit code | what it is |", "|---|---|---|---|"]
    for kind in all_kinds():
        if not kind.what:
            raise MissingWordsError(f"the error {kind.name} has no description")
        lines.append(f"| `{kind.name}` | {kind.room} | {kind.exit_code} | {_escape(kind.what)} |")
    lines += ["\n## Refusals over HTTP\n", "| status | code | message |", "|---|---|---|"]
    found = list(all_messages())
    rows = {(one.status or "", one.code or "", one.text) for one in found if one.kind == "Refusal"}
    lines += [
        f"| {s} | {f'`{c}`' if c else ''} | {_escape(t)} |" for s, c, t in sorted(rows, key=str)
    ]
    lines += ["\n## Messages\n", "| message | hint |", "|---|---|"]
    texts = {(one.text, one.hint or "") for one in found if one.kind != "Refusal" and one.text}
    lines += [f"| {_escape(text)} | {_escape(hint)} |" for text, hint in sorted(texts)]
    return "\n".join(lines) + "\n"


def states_page() -> str:
    """The state tables, drawn from the code."""
    lines = [
        "# States\n",
        "Drawn from the tables in the code; what a table does not have cannot happen.\n",
    ]
    for title, table in (("A replica", replicas.TRANSITIONS),
                         ("A machine", machine_states.TRANSITIONS),
                         ("A process and its device", device_states.TRANSITIONS)):  # fmt: skip
        lines += [
            f"## {title}\n",
            "| in this state | when this happens | it goes to |",
            "|---|---|---|",
        ]
        lines += [f"| {state.value} | {event.value} | {target.value} |"
                  for (state, event), target in table.items()]  # fmt: skip
        lines.append("")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """For a table's cell: one line, no markup of its own."""
    text = " ".join(text.split())
    if "`" not in text:
        text = text.replace("*", "\\*")
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES: dict[str, Callable[[], str]] = {
    "cli.md": cli_page,
    "app-file.md": app_file_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "api.md": api_page,
    "openapi.json": lambda: json.dumps(api_document(), indent=2) + "\n",
    "errors.md": errors_page,
    "states.md": states_page,
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (folder / name).write_text(make())
        print(folder / name)


if __name__ == "__main__":
    main()
