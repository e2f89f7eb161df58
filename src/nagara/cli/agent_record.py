"""Where a running agent can be found by who did not start it: `node/agent.json` of its state.

    {"pid", "began", "address", "version"}

`began` is the kernel's time of the process's start, so that a number that was used again is not
taken for the agent. `address` is empty when other machines are not served.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from nagara import __version__
from nagara.base.durable import write_durably


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One running agent."""

    pid: int
    began: int  # clock ticks since the machine was started
    address: str
    version: str


@contextmanager
def recorded(state: Path, address: str) -> Iterator[None]:
    """This process is the state folder's agent while the context lasts."""
    file = _file(state)
    record = AgentRecord(os.getpid(), _began(os.getpid()), address, __version__)
    write_durably(file, json.dumps(asdict(record)).encode(), mode=0o644)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def running_agent(state: Path) -> AgentRecord | None:
    """The state folder's agent, if one runs."""
    try:
        record = AgentRecord(**json.loads(_file(state).read_bytes()))
        return record if _began(record.pid) == record.began else None
    except (OSError, ValueError, TypeError):
        return None


def _file(state: Path) -> Path:
    return state / "node" / "agent.json"


def _began(pid: int) -> int:
    """Field 22 of proc_pid_stat(5). Raises OSError where there is no such process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) if fields[0] != "Z" else -1
