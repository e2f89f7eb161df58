"""Runs every command of README.md and of the guides, as a new user would.

    python scripts/docs_test.py [PAGE...]     all pages, or those named

In an environment of its own: nagara is built as a wheel and installed into an empty virtual
environment (kept in `build/docs-test` until the sources change), each page has an empty folder
and an empty state, and nothing else of this checkout but its `examples`. All commands of a
page run in one shell, in their order; one that fails ends the page.

What stands before a block of code says how it is treated:

    <!-- run: no, REASON -->                   it is not run; the reason is printed
    <!-- run: background, until TEXT -->       it goes on until the page ends
    <!-- file: NAME -->                        the block is written to that file
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "docs-test"
_GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = ("README.md", *(str(guide.relative_to(ROOT)) for guide in _GUIDES), "docs/guide.md",
         "docs/command-line.md", "docs/engine.md")  # fmt: skip
EXTRAS = "smollm2,pool"
_PAGE_S = 600
_READY_S = 120

_BLOCK = re.compile(
    r"(?P<marks>(?:^<!-- .*? -->\n)*)^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"^<!-- (\w+): (.*?) -->$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, or a file to write. `until` is what a command in the background says when it
    is ready; `skipped` is why it is not run."""

    text: str
    file: str | None = None
    until: str | None = None
    skipped: str | None = None


def steps(page: str) -> Iterator[Step]:
    """The steps of a page's text. Raises ValueError for a mark that is none."""
    for block in _BLOCK.finditer(page):
        marks = dict(_MARK.findall(block["marks"]))
        if "file" in marks:
            yield Step(block["body"], file=marks["file"])
        elif block["kind"] == "console":
            how, _, what = marks.get("run", "").partition(", ")
            if how not in ("", "no", "background") or (how and not what):
                raise ValueError(f"{marks['run']!r} is no way to run a block")
            for command in commands(block["body"]):
                until = what.removeprefix("until ") if how == "background" else None
                yield Step(command, until=until, skipped=what if how == "no" else None)


def commands(block: str) -> Iterator[str]:
    """The lines after `$ `, each with those that it goes on in."""
    lines = iter(block.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command += "\n" + next(lines)
            yield command


def script(page: Sequence[Step], log: Path) -> str:
    """A shell script of the steps. Commands in the background end with it."""
    # With job control each command in the background is a group of its own, ended as a whole.
    end = "for job in $(jobs -p); do kill -- -$job 2>/dev/null; done; wait"
    lines = ["set -meuo pipefail", f"trap {shlex.quote(end)} EXIT"]
    for number, step in enumerate(page):
        if step.skipped is not None:
            continue
        if step.file is not None:
            lines.append(f"printf %s {shlex.quote(step.text)} > {shlex.quote(step.file)}")
            continue
        lines.append(f"printf '%s\\n' {shlex.quote('$ ' + step.text)}")
        if step.until is None:
            lines.append(step.text)
            continue
        said = log / f"{number}.log"
        # It takes the shell's place, so that who waits for the one waits for the other.
        lines.append(f"(exec {step.text}\n) > {said} 2>&1 &")
        has_said, fail = f"grep -q {shlex.quote(step.until)} {said}", f"{{ cat {said}; exit 1; }}"
        lines.append(
            f"for _ in $(seq {_READY_S * 10}); do {has_said} && break; "
            f"kill -0 $! || {fail}; sleep 0.1; done; {has_said} || {fail}"
        )
    return "\n".join(lines) + "\n"


def environment() -> Path:
    """The virtual environment with the wheel of these sources, made anew when they changed."""
    newest = max(p.stat().st_mtime for p in (ROOT / "src").rglob("*") if p.is_file())
    stamp, made = BUILD / "made", BUILD / "venv"
    if stamp.exists() and stamp.stat().st_mtime > newest:
        return made
    dist = BUILD / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(dist)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    venv.create(made, clear=True, with_pip=True, symlinks=True)
    print(f"installing {wheel.name}[{EXTRAS}] into an empty environment", flush=True)
    pip = [str(made / "bin/python"), "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]"]
    subprocess.run([*pip, "--disable-pip-version-check", "--root-user-action=ignore"], check=True)
    stamp.touch()
    return made


def run_page(name: str, made: Path) -> tuple[bool, int, int]:
    """(whether all went well, commands run, commands left out)."""
    page = list(steps((ROOT / name).read_text()))
    done = sum(step.skipped is None and step.file is None for step in page)
    left = sum(step.skipped is not None for step in page)
    # Replicas of the `host` image see /srv, not /tmp.
    where = "/srv" if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="nagara-docs-", dir=where) as scratch:
        folder, log = Path(scratch) / "work", Path(scratch) / "log"
        shims = Path(scratch) / "bin"
        for each in (folder, log, shims):
            each.mkdir()
        prepare(folder, shims)
        state = Path(scratch) / "state"
        state.mkdir()
        tools = ROOT / ".state" / "tools"
        if tools.exists():  # CRIU has been fetched once: that is not tried each time
            (state / "tools").symlink_to(tools.resolve())
        env = {
            "PATH": f"{shims}:{made / 'bin'}:{os.environ['PATH']}", "HOME": str(folder),
            "NAGARA_STATE": str(state), "HF_HUB_OFFLINE": "1", "LANG": "C.UTF-8",
            "TERM": "dumb", "COLUMNS": "110", "SHELL": "/bin/bash",
        }  # fmt: skip
        is_good = _run(script(page, log), folder, env)
        subprocess.run([str(made / "bin/nagara"), "doctor", "--leaks", "--clear"], env=env,
                       capture_output=True, check=False)  # fmt: skip
    for step in page:
        if step.skipped is not None:
            print(f"   not run ({step.skipped}): {step.text.splitlines()[0]}")
    return is_good, done, left


def prepare(folder: Path, shims: Path) -> None:
    """What a reader is supposed to have: examples, a model folder, sudo."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    model = ROOT / ".state" / "models" / "smollm2"
    if model.exists():
        ignore = shutil.ignore_patterns("nagara-model.json")
        shutil.copytree(model.resolve(), folder / "my-model", ignore=ignore)
    if shutil.which("sudo") is None:
        sudo = shims / "sudo"
        sudo.write_text('#!/bin/sh\nexec "$@"\n')
        sudo.chmod(0o755)


def _run(text: str, folder: Path, env: dict[str, str]) -> bool:
    process = subprocess.Popen(
        ["bash", "-c", text], cwd=folder, env=env, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(_PAGE_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def main() -> int:
    made = environment()
    failed, ran, left_out = [], 0, 0
    for name in sys.argv[1:] or PAGES:
        begun_s = time.monotonic()
        print(f"== {name}", flush=True)
        is_good, done, left = run_page(name, made)
        ran, left_out = ran + done, left_out + left
        print(f"== {name}: {time.monotonic() - begun_s:.0f} s", flush=True)
        if not is_good:
            failed.append(name)
            print(f"error: {name}: its last command above failed", file=sys.stderr)
    count = len(sys.argv[1:] or PAGES)
    print(f"{ran} commands of {count} pages run, {left_out} left out with a reason")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
