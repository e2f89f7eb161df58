"""What README.md shows comes from commands: the figures from stored results, and a transcript."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "readme", Path(__file__).parents[2] / "scripts/readme.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
readme: ModuleType = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(readme)

TEXT = readme.README.read_text()
MARKS = (readme.TRANSCRIPT, readme.FIGURES)


def between(mark: str) -> str:
    begin, end = readme.marks(mark)
    (block,) = TEXT.split(begin)[1:]
    return str(block.partition(end)[0])


def test_the_figures_are_those_of_the_stored_results() -> None:
    results = readme.read_results()
    assert between(readme.FIGURES) == readme.figures_of(results)
    for name, arguments in readme.COMMANDS.items():
        assert results[name]["command"] == f"nagara bench {' '.join(arguments)}"


def test_figures_outside_the_marks_are_none_of_a_benchmark() -> None:
    """Times and factors stand between the marks, where they cannot grow old."""
    outside = TEXT
    for mark in MARKS:
        outside = outside.replace(between(mark), "")
    assert re.findall(r"\d[\d.]* (?:s|ms|times)\b", outside) == []


def test_where_a_restore_is_not_faster_it_is_said() -> None:
    results = readme.read_results()
    kinds = results["coldstart-small"]["kinds"]
    kinds["plain_cold"]["median_s"], kinds["restored_cold"]["median_s"] = 0.2, 0.4
    assert "| 0.20 s → 0.40 s, **0.50** |" in readme.figures_of(results)


def test_the_transcript_is_one_of_the_command() -> None:
    block = between(readme.TRANSCRIPT)
    assert block.startswith("```console\n$ nagara doctor\nnagara ")
    shown, now = block.splitlines(), readme.run_doctor(Path("/nowhere")).splitlines()

    def names(lines: list[str]) -> list[str]:
        return [
            found[1] for line in lines if (found := re.match(r"(\w+) +(?:works|lacking) ", line))
        ]

    # What works differs; what is looked at does not, but for what depends on something absent.
    assert len(names(shown)) > 15
    assert set(names(shown)) <= set(names(now)) | {"checkpoint", "cdi", "device_memory"}


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    for mark in MARKS:
        begin, end = readme.marks(mark)
        text = f"before\n{begin}old\n{end}after\n"
        assert readme.replaced(text, mark, "new\n") == text.replace("old", "new")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_mark_is_named(lost: int) -> None:
    begin, end = readme.marks(readme.FIGURES)
    mark = (begin, end)[lost]
    text = f"before\n{begin}old\n{end}after\n".replace(mark, "")
    with pytest.raises(readme.ReadmeError, match=mark.strip()):
        readme.replaced(text, readme.FIGURES, "new\n")


def test_the_command_runs_and_its_output_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    shown = readme.run_doctor(tmp_path)
    assert "replicas run as" in shown
    assert str(tmp_path) not in shown
