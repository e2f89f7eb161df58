"""The OCI runtime's command line: what nagara asks of runc, and what its answers mean.

Commands that create a container are only *composed* here, because the keeper must run them to
become the container's parent; the others run here, each with a time limit. Blocking: call from
a worker thread.
"""

import contextlib
import functools
import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError

_CRIU_ERROR = re.compile(r"Error \([^)]*\): (.*)")
# RLIMIT_NOFILE concerns the tool's own limit and is harmless.
_ONLY_THE_WAY_OUT = ("RLIMIT_NOFILE", "exited, status", "FAILED.", "killed by signal")
# runc's own log format; the last message is the outermost error with all its causes.
_LAST_MESSAGE = re.compile(r'.*msg="((?:[^"\\]|\\.)*)"', re.DOTALL)
_PAUSE_TRIES, _PAUSE_AGAIN_S = 4, 0.1
_QUICK_S = 30.0
_CHECKPOINT_S = 600.0
_LIBRARY = re.compile(r"(/\S+) \(0x")  # in what ldd says
_NO_CAUSE = ("RLIMIT_NOFILE", "cgroupd")  # errors that CRIU writes and is not ended by


class RuncError(NagaraError):
    """runc failed; the message carries the last lines it wrote."""


@dataclass(frozen=True, slots=True)
class Runc:
    """One runc with its own state folder.

    Args:
        runc: the program.
        criu: the checkpoint tool it shall use; None where there is none.
        state: folder for runc's records of containers.
    """

    runc: Path
    criu: Path | None
    state: Path

    def _base(self) -> list[str]:
        command = [str(self.runc), "--root", str(self.state)]
        return [*command, "--criu", str(self.criu)] if self.criu else command

    def programs(self) -> list[Path]:
        """The files that a restore runs, with their libraries. Blocking the first time."""
        if self.criu is None:
            return [*_with_libraries(self.runc)]
        own = self.criu.resolve().parent / "usr"  # of a CRIU that brings its libraries along
        its = own.glob("lib/*/*.so*") if own.is_dir() else _with_libraries(self.criu)
        return [*_with_libraries(self.runc), self.criu, *own.glob("sbin/criu"), *its]

    def run_command(self, container: str, bundle: Path, pid_file: Path) -> list[str]:
        """Creates and starts a container and ends; the container goes on."""
        options = ["--detach", "--pid-file", str(pid_file), "--bundle", str(bundle)]
        return [*self._base(), "run", *options, container]

    def restore_command(
        self, container: str, bundle: Path, pid_file: Path, image: Path, work: Path
    ) -> list[str]:
        """Creates a container out of a checkpoint in `image`; logs of CRIU go to `work`."""
        options = ["--detach", "--pid-file", str(pid_file), "--bundle", str(bundle)]
        options += ["--image-path", str(image), "--work-path", str(work)]
        return [*self._base(), "restore", *options, container]

    def pause(self, container: str) -> None:
        """Freezes all processes of the container.

        On a busy machine the older kind of control group sometimes does not freeze in the time
        that runc gives it; it is then thawed again, and tried again.
        """
        for _ in range(_PAUSE_TRIES - 1):
            with contextlib.suppress(RuncError):
                self._run("pause", container)
                return
            time.sleep(_PAUSE_AGAIN_S)
        self._run("pause", container)

    def checkpoint(
        self, container: str, image: Path, work: Path, *, time_limit_s: float = _CHECKPOINT_S
    ) -> None:
        """Writes the paused container's memory to `image`; it stays paused.

        Runs in the folder `work`, by which it is found when this process is killed meanwhile.
        """
        options = ["--leave-running", "--image-path", str(image), "--work-path", str(work)]
        try:
            self._run("checkpoint", *options, container, time_limit_s=time_limit_s, cwd=work)
        except RuncError as error:
            raise RuncError(
                "the checkpoint tool could not save the process: "
                + (criu_complaint(work / "dump.log") or error.what),
                where=container,
            ) from error

    def exec(self, container: str, command: tuple[str, ...], *, time_limit_s: float) -> None:
        """Runs a command inside the container, as its first process was, to its end."""
        self._run("exec", container, *command, time_limit_s=time_limit_s)

    def exec_command(self, container: str, command: tuple[str, ...], *, tty: bool) -> list[str]:
        """What to run to have a command in a container with streams of one's own."""
        return [*self._base(), "exec", *(["--tty"] if tty else []), container, *command]

    def delete(self, container: str) -> None:
        """Removes runc's record and cgroups of a container that has ended."""
        self._run("delete", "--force", container)

    def containers(self) -> tuple[str, ...]:
        """The containers runc has a record of."""
        listing = json.loads(self._run("list", "--format", "json") or "null")
        return tuple(entry["id"] for entry in listing or ())

    def _run(self, *arguments: str, time_limit_s: float = _QUICK_S, cwd: Path | None = None) -> str:
        try:
            done = subprocess.run(
                [*self._base(), *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=time_limit_s,
                cwd=cwd,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuncError(f"runc {arguments[0]} took over {time_limit_s:.0f} s") from error
        except OSError as error:
            raise RuncError(f"runc cannot be run: {error}", where=str(self.runc)) from error
        if done.returncode != 0:
            said = _LAST_MESSAGE.search(done.stderr) or [None, done.stderr.strip()[-500:]]
            raise RuncError(f"runc {arguments[0]} failed: {said[1]}")
        return done.stdout


@functools.cache
def _with_libraries(program: Path) -> tuple[Path, ...]:
    """The program and the shared libraries it is loaded with; without these where nobody tells."""
    try:
        told = subprocess.run(
            ["ldd", program], capture_output=True, text=True, timeout=_QUICK_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        told = ""
    return (program, *(Path(found) for found in _LIBRARY.findall(told)))


def criu_complaint(log: Path) -> str | None:
    """The telling errors in a log of CRIU; None when there are none.

    Its first errors name the cause, later ones only the way out.
    """
    errors = [match[1].strip() for line in _lines(log) if (match := _CRIU_ERROR.search(line))]
    telling = [error for error in errors if not any(words in error for words in _ONLY_THE_WAY_OUT)]
    return "; ".join(telling[:2]) or None


def criu_gave_up(log: Path) -> bool:
    """Whether CRIU itself came to the end of its attempt; it did not if it was killed.

    It says so, or, where it cannot even begin, its complaint is the last thing it says. When it
    is killed, its helper for control groups complains last.
    """
    lines = _lines(log)
    last = lines[-1] if lines else ""
    complained_last = "Error (" in last and not any(text in last for text in _NO_CAUSE)
    return complained_last or any(" FAILED." in line for line in lines)


def _lines(log: Path) -> list[str]:
    try:
        return log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
