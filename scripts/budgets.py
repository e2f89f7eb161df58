"""Checks the size budgets: files, functions, and the ground floor as a whole.

Run by `make check` from the repository's root. An exception is a line in
`scripts/budget-exceptions.txt`: what it concerns, a limit of its own, and the reason. One that is
no longer needed is reported too.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 50  # without the docstring: explaining costs nothing
BASE_LINES = 300  # all of nagara/base
FOLDERS = ("src", "tests", "scripts")
EXCEPTIONS = Path("scripts/budget-exceptions.txt")


@dataclass(frozen=True, slots=True)
class Size:
    """One measured thing: `src/nagara/x.py`, `src/nagara/x.py:Class.function`, or a folder."""

    what: str
    lines: int
    limit: int


def measure_file(path: Path) -> Iterator[Size]:
    """The file's own size and that of each function in it."""
    text = path.read_text()
    yield Size(str(path), len(text.splitlines()), FILE_LINES)
    yield from _functions(ast.parse(text), f"{path}:")


def _functions(node: ast.AST, prefix: str) -> Iterator[Size]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            lines = child.end_lineno - child.lineno + 1 - _docstring_lines(child)
            yield Size(prefix + child.name, lines, FUNCTION_LINES)
            inner = f"{prefix}{child.name}."
        elif isinstance(child, ast.ClassDef):
            inner = f"{prefix}{child.name}."
        yield from _functions(child, inner)


def _docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def read_exceptions(text: str) -> dict[str, int]:
    """`WHAT LIMIT REASON` a line; a line without a reason is an error."""
    limits = {}
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        what, limit, *reason = line.split(None, 2)
        if not reason:
            raise ValueError(f"{EXCEPTIONS}: no reason given for {what}")
        limits[what] = int(limit)
    return limits


def judge(sizes: list[Size], exceptions: dict[str, int]) -> list[str]:
    """What is over its budget, and which exceptions are not needed, in words."""
    faults = []
    needed = set()
    for size in sizes:
        limit = size.limit
        if size.lines > limit and size.what in exceptions:
            needed.add(size.what)
            limit = exceptions[size.what]
        if size.lines > limit:
            faults.append(f"{size.what}: {size.lines} lines, the limit is {limit}")
    faults += [f"{EXCEPTIONS}: {what} needs no exception" for what in exceptions.keys() - needed]
    return sorted(faults)


def main() -> int:
    files = [path for folder in FOLDERS for path in sorted(Path(folder).rglob("*.py"))]
    sizes = [size for path in files for size in measure_file(path)]
    base = Path("src/nagara/base")
    base_lines = sum(len(path.read_text().splitlines()) for path in base.glob("*.py"))
    sizes.append(Size(str(base), base_lines, BASE_LINES))
    faults = judge(sizes, read_exceptions(EXCEPTIONS.read_text()))
    for fault in faults:
        print(fault)
    print(f"size budgets: {len(files)} files, {len(faults)} faults; base has {base_lines} lines")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
