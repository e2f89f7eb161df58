import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

_SPEC = importlib.util.spec_from_file_location(
    "transcript", Path(__file__).parents[2] / "scripts/transcript.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
transcript: ModuleType = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(transcript)

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_has_a_place_for_the_transcript() -> None:
    text = README.read_text()
    assert transcript.replaced(text, "new\n").count("new\n") >= 1
    (block,) = text.split(transcript.BEGIN)[1:]
    assert block.startswith("```console\n$ nagara doctor\nnagara ")


def test_only_what_stands_between_the_marks_is_replaced() -> None:
    text = f"before\n{transcript.BEGIN}old\n{transcript.END}after\n"
    assert transcript.replaced(text, "new\n") == text.replace("old", "new")


@pytest.mark.parametrize("lost", [transcript.BEGIN, transcript.END])
def test_a_missing_mark_is_named(lost: str) -> None:
    text = f"before\n{transcript.BEGIN}old\n{transcript.END}after\n".replace(lost, "")
    with pytest.raises(transcript.TranscriptError, match=lost.strip()):
        transcript.replaced(text, "new\n")


def test_the_command_runs_and_its_output_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    shown = transcript.run_doctor(tmp_path)
    assert "replicas run as" in shown
    assert str(tmp_path) not in shown
