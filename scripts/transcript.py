"""Puts the output of a real `nagara doctor` into README.md, between two marks.

    python scripts/transcript.py           runs the command here and replaces what is there
    python scripts/transcript.py --check   runs it too, but only says whether that works

What a machine has differs from one to the next, so checking does not compare the contents.
"""

import os
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- transcript of nagara doctor -->\n", "<!-- end of transcript -->\n"
_COLUMNS = 112
_TIME_LIMIT_S = 300


class TranscriptError(Exception):
    """The command failed, or the file has no place for its output."""


def replaced(text: str, transcript: str) -> str:
    """`text` with what stands between the marks replaced."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise TranscriptError(f"{README.name} lacks the mark {(END if begin else BEGIN).strip()}")
    return f"{before}{BEGIN}{transcript}{END}{after}"


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
        raise TranscriptError(f"nagara doctor ended with {done.returncode}: {done.stderr}")
    shown = done.stdout.replace(str(state), state.name)
    lines = [line.rstrip() for line in shown.splitlines()]
    return "\n".join(["```console", "$ nagara doctor", *lines, "```", ""])


def main() -> int:
    state = Path(os.environ.get("NAGARA_STATE", README.parent / ".state")).absolute()
    text = README.read_text()
    try:
        new = replaced(text, run_doctor(state))
    except TranscriptError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
