"""The example in the documents works as it is written there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_example_chats_until_its_input_ends(tiny: Path) -> None:
    command = [sys.executable, "-m", "examples.chat", str(tiny)]
    said = subprocess.run(
        command, cwd=ROOT, input="the quick\nbrown fox\n", capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    first, second, third = said.stdout.split("you: ")[1:]
    assert len(first + second) > len("\n\n"), "not a single token of two answers was shown"
    assert first.endswith("\n")
    assert third == "\n"
