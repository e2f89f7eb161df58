"""A real Ray cluster on this machine: a head and machines, each with a state folder of its own.

All its processes carry a mark in their environment, and are ended by it one by one.
"""

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

_RAY = (sys.executable, "-P", "-m", "ray.scripts.scripts", "start")
_SIZE = ("--object-store-memory=80000000", "--disable-usage-stats")


class RayCluster:
    """`address` is the head's. The head has no cores: nothing is lent there but by name.

    Args:
        options: more of `ray start --head`.
        environment: more of the head's.
    """

    def __init__(
        self,
        folder: Path,
        options: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            pytest.skip("needs Ray: pip install 'nagara[cluster]'")
        self.folder = folder
        self.mark = f"NAGARA_TEST_CLUSTER={secrets.token_hex(8)}"
        # Sockets lie in it, whose paths may have 107 bytes.
        self._temporary = Path(tempfile.mkdtemp(prefix="nr-", dir="/tmp"))
        try:
            said = self._start(
                folder / "head", "--head", "--port=0", "--num-cpus=1", "--include-dashboard=false",
                f"--temp-dir={self._temporary}", *options, environment=environment,
            )  # fmt: skip
            found = re.search(r"--address='([^']+)'", said)
            assert found is not None, said
            self.address = found[1]
        except BaseException:
            self.end()
            raise

    def join(self, name: str, cores: int = 2) -> Path:
        """One more machine; its state folder."""
        state = self.folder / name
        self._start(state, f"--address={self.address}", f"--num-cpus={cores}")
        return state

    def _start(
        self, state: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> str:
        key, _, value = self.mark.partition("=")
        done = subprocess.run(
            [*_RAY, *options, *_SIZE],
            capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "NAGARA_STATE": str(state), key: value,
                 "RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000",
                 "RAY_health_check_failure_threshold": "3", **(environment or {})},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def processes(self, part: str) -> list[int]:
        """Those of the cluster whose command has this in it."""
        return [pid for pid, command in self._all().items() if part in command]

    def _all(self) -> dict[int, str]:
        found, parents, commands = set(), {}, {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    status = (entry / "stat").read_text().rpartition(")")[2].split()
                    if status[0] == "Z":
                        continue
                    parents[int(entry.name)] = int(status[1])
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    commands[int(entry.name)] = command
                    if self.mark.encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
        # Ray's workers write their titles over their environment: they are known by their parents.
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return {pid: commands.get(pid, "") for pid in found - {os.getpid()}}

    def kill(self, part: str) -> None:
        """Kills the cluster's processes whose command has this in it."""
        for pid in self.processes(part):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills everything that is left of it."""
        for pid in self.processes("nagara.cli.main"):  # replicas end in order
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            if not (left := self._all()):
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        shutil.rmtree(self._temporary, ignore_errors=True)
