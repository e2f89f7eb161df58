"""`nagara errors`: everything that nagara may say went wrong, as the code has it.

The kinds come from the classes, the messages from the source text: each place that raises one.
Nothing is executed for it but imports.
"""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import nagara
from nagara.base.errors import NagaraError
from nagara.cli.exit_codes import EXIT_CODES, exit_code_of_kind
from nagara.cli.output import json_option, tell

# Rooms with errors of their own; importing them loads no torch.
_ROOMS = ("base", "contract", "store", "image", "sandbox", "snapshot", "node", "pool", "control")
_REFUSALS = {"Refusal": 0, "bad_request": 400, "not_found": 404, "unauthorised": 401}


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of errors."""

    name: str
    room: str
    exit_code: int
    what: str


@dataclass(frozen=True, slots=True)
class Message:
    """One place that raises an error. `{...}` in its text stands for what is known only then."""

    kind: str
    text: str
    hint: str | None
    place: str
    code: str | None = None  # of an HTTP answer
    status: int | None = None


@click.command()
@click.option("--messages", is_flag=True, help="Every message with its hint, not only the kinds.")
@json_option
def errors(messages: bool, as_json: bool) -> None:
    """List what can go wrong: kinds of errors with their exit codes, or every message."""
    found = list(all_messages()) if messages else []
    kinds = list(all_kinds())
    if as_json:
        document = {
            "exit_codes": EXIT_CODES,
            "kinds": [asdict(kind) for kind in kinds],
            "messages": [asdict(message) for message in found],
        }
        tell(document, as_json=True)
        return
    console = Console(highlight=False)
    console.print(_message_table(found) if messages else _kind_table(kinds))
    if not messages:
        for code, meaning in EXIT_CODES.items():
            click.echo(f"exit code {code}: {meaning}")


def all_kinds() -> Iterator[Kind]:
    """Every class of errors that a person may see, by room."""
    for room in _ROOMS:
        package = importlib.import_module(f"nagara.{room}")
        for info in pkgutil.walk_packages(package.__path__, f"nagara.{room}."):
            importlib.import_module(info.name)
    for kind in sorted(_below(NagaraError), key=lambda one: (one.__module__, one.__name__)):
        if not kind.__module__.startswith("nagara.") or ".testing" in kind.__module__:
            continue
        room = kind.__module__.split(".")[1]
        what = (kind.__doc__ or "").strip().split("\n\n")[0]
        yield Kind(kind.__name__, room, exit_code_of_kind(kind), " ".join(what.split()))


def _below(kind: type[NagaraError]) -> Iterator[type[NagaraError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _below(each)


def all_messages() -> Iterator[Message]:
    """Every place in the source that makes an error or a refusal with a text of its own."""
    root = Path(nagara.__file__).parent
    kinds = {kind.name for kind in all_kinds()}
    for file in sorted(root.rglob("*.py")):
        if "testing" in file.parts:
            continue
        place = str(file.relative_to(root.parent))
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                message = _message(node, node.func.id, kinds, f"{place}:{node.lineno}")
                if message is not None:
                    yield message


def _message(call: ast.Call, name: str, kinds: set[str], place: str) -> Message | None:
    options = {each.arg: each.value for each in call.keywords if each.arg}
    if name in kinds and call.args:
        hint = options.get("hint")
        return Message(name, _text(call.args[0]), None if hint is None else _text(hint), place)
    if name in _REFUSALS and call.args:
        at = 1 if name == "Refusal" else 0
        if len(call.args) <= at:
            return None
        status = call.args[0] if name == "Refusal" else ast.Constant(_REFUSALS[name])
        code = options.get("code")
        return Message(
            "Refusal",
            _text(call.args[at]),
            None,
            place,
            None if code is None else _text(code),
            status.value if isinstance(status, ast.Constant) else None,  # type: ignore[arg-type]
        )
    return None


def _text(node: ast.expr) -> str:
    """The text of an expression: literals as they are, the rest in braces."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "{" + ast.unparse(node) + "}"


def _kind_table(kinds: list[Kind]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("kind", "room", "exit code", "what it is"):
        table.add_column(column, overflow="fold")
    for kind in kinds:
        table.add_row(kind.name, kind.room, str(kind.exit_code), Text(kind.what))
    return table


def _message_table(messages: list[Message]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("message", "hint", "kind", "place"):
        table.add_column(column, overflow="fold")
    for message in messages:
        table.add_row(Text(message.text), Text(message.hint or ""), message.kind, message.place)
    return table
