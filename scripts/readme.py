"""Puts into README.md what commands say: the figures of the benchmarks, and a real `nagara doctor`.

    python scripts/readme.py figures             from the JSON in `bench/results/`
    python scripts/readme.py figures --measure   the same after the benchmarks ran (root, minutes)
    python scripts/readme.py transcript          runs `nagara doctor` here
    python scripts/readme.py check               ends with 1 if the figures are other ones, or the
                                                 command does not work

Nothing between the marks is written by hand. What a machine has differs from one to the next, so
the transcript's contents are not compared.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "bench" / "results"
TRANSCRIPT, FIGURES = "transcript of nagara doctor", "figures"
# What each file of results is made by.
COMMANDS = {
    "coldstart": ("coldstart", "--runs", "5"),
    "coldstart-compile": ("coldstart", "--compile", "--runs", "3"),
    "coldstart-small": ("coldstart", "--app", "small", "--runs", "9"),
    "gateway": ("gateway",),
}
_KINDS = {
    "plain_cold": "plain, nothing cached", "plain_warm": "plain, caches warm",
    "restored_cold": "restored, disk cold", "restored_warm": "restored, caches warm",
}  # fmt: skip
_SERVERS = {
    "coldstart": "SmolLM2 behind nagara's engine",
    "coldstart-compile": "the same, compiling its forward pass",
    "coldstart-small": "Python's own HTTP server, which needs no time to start",
}
_BAR = 40
_COLUMNS = 132
_TIME_LIMIT_S = 300

Results = dict[str, dict[str, Any]]


class ReadmeError(Exception):
    """A command failed, or the file has no place for what it says."""


def replaced(text: str, mark: str, new: str) -> str:
    """`text` with what stands between the marks of that name replaced."""
    begin, end = marks(mark)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        lacking = end if found_begin else begin
        raise ReadmeError(f"{README.name} lacks the mark {lacking.strip()}")
    return f"{before}{begin}{new}{end}{after}"


def marks(mark: str) -> tuple[str, str]:
    """The lines between which it stands."""
    return f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"


# -- the transcript --------------------------------------------------------------------------------


def run_doctor(state: Path) -> str:
    """A console block with the command and what it printed; the state folder's path is cut."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "doctor"],
        env={**os.environ, "COLUMNS": str(_COLUMNS), "TERM": "dumb"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIME_LIMIT_S,
        check=False,
    )
    if done.returncode != 0 or not done.stdout:
        raise ReadmeError(f"nagara doctor ended with {done.returncode}: {done.stderr}")
    shown = done.stdout.replace(str(state), state.name)
    lines = [line.rstrip() for line in shown.splitlines()]
    return "\n".join(["```console", "$ nagara doctor", *lines, "```", ""])


# -- the figures -----------------------------------------------------------------------------------


def read_results(folder: Path = RESULTS) -> Results:
    """What the benchmarks have said. Raises OSError, ValueError."""
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in COMMANDS}


def measure(state: Path) -> None:
    """Runs every benchmark and keeps what it says."""
    RESULTS.mkdir(exist_ok=True)
    for name, arguments in COMMANDS.items():
        shown = f"nagara bench {' '.join(arguments)}"
        print(shown, file=sys.stderr, flush=True)
        command = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(state), "bench",
                   *arguments, "--json"]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise ReadmeError(f"{shown} ended with {done.returncode}")
        document = {**json.loads(done.stdout), "command": shown}
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")


def figures_of(results: Results) -> str:
    """Bars of the first benchmark, a table of all starts, and what the gateway costs."""
    gateway = results["gateway"]
    lost = (
        f"A request to a server that runs loses {gateway['added_p50_ms']:.1f} ms in the gateway "
        f"(`nagara bench gateway`)."
    )
    return "\n".join([*_bars(results["coldstart"]), "", *_table(results), "", lost, ""])


def _bars(coldstart: dict[str, Any]) -> Iterator[str]:
    kinds, machine = coldstart["kinds"], coldstart["machine"]
    yield "From a request to the first token of an app that is not running: SmolLM2 behind nagara's"
    yield (
        f"engine on {machine['cores']} cores ({machine['cpu']}) without a GPU (`nagara bench "
        f"coldstart`, medians of {coldstart['runs']}):"
    )
    yield ""
    yield "```text"
    longest_s = max(kind["median_s"] for kind in kinds.values())
    width = max(map(len, _KINDS.values()))
    for name, words in _KINDS.items():
        median_s = kinds[name]["median_s"]
        bar = "█" * round(_BAR * median_s / longest_s)
        yield f"{words:<{width}}  {_seconds(median_s):>6}  {bar}"
    stages = kinds["restored_warm"]["stages"]
    shares = " · ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in stages.items())
    yield ""
    yield f"{_KINDS['restored_warm']}  {shares} ms"
    yield "```"


def _table(results: Results) -> Iterator[str]:
    """Where a restore is not faster, its ratio is bold."""
    yield "| plain → restored, times faster | disk cold | caches warm |"
    yield "|---|---|---|"
    for name, words in _SERVERS.items():
        kinds = results[name]["kinds"]
        cells = []
        for heat in ("cold", "warm"):
            plain_s, restored_s = (
                kinds[f"{kind}_{heat}"]["median_s"] for kind in ("plain", "restored")
            )
            ratio = plain_s / restored_s
            shown = f"{ratio:.1f}" if ratio > 1.05 else f"**{ratio:.2f}**"
            cells.append(f"{_seconds(plain_s)} → {_seconds(restored_s)}, {shown}")
        yield f"| {' | '.join((words, *cells))} |"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2f} s"


def main() -> int:
    what, *options = sys.argv[1:] or [""]
    state = Path(os.environ.get("NAGARA_STATE", ROOT / ".state")).absolute()
    text = README.read_text()
    try:
        if what == "transcript":
            text = replaced(text, TRANSCRIPT, run_doctor(state))
        elif what in ("figures", "check"):
            if "--measure" in options:
                measure(state)
            new = replaced(text, FIGURES, figures_of(read_results()))
            if what == "check":
                run_doctor(state)
                if new != text:
                    raise ReadmeError("README.md has other figures than bench/results")
            text = new
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except (ReadmeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if what != "check":
        README.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
