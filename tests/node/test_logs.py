from pathlib import Path

import pytest

from nagara.contract.node import ReplicaGoneError
from nagara.contract.replica import Lease
from nagara.node.logs import ReplicaLogs
from nagara.node.replica_folder import ReplicaRecord


def record(replica: str) -> ReplicaRecord:
    return ReplicaRecord(replica, "default", "app", "d", Lease("slot", 1), 8000)


def test_a_log_that_is_being_rotated_keeps_no_start_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = ReplicaLogs(tmp_path)
    logs.prepare(record("app-1"))
    logs.path_for(record("app-1")).write_text("x")
    missing = logs.path_for(record("app-2"))
    listed = [*missing.parent.glob("*.log"), missing]  # listed before the keeper renamed it
    monkeypatch.setattr(Path, "glob", lambda *_: iter(listed))
    logs.prepare(record("app-3"))
    monkeypatch.setattr(Path, "glob", lambda *_: iter([missing]))
    with pytest.raises(ReplicaGoneError):
        logs.tail("app-2", 10)


def test_the_oldest_logs_make_room(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path)
    for number in range(25):
        logs.prepare(record(f"app-{number}"))
        logs.path_for(record(f"app-{number}")).write_text("x")
    assert len(list(tmp_path.glob("*/*/*.log"))) == 20
