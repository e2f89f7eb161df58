import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from nagara.base.errors import NagaraError
from nagara.cli import bench_rounds
from nagara.cli.instance import Reply
from nagara.cli.main import main


class FakeInstance:
    """Answers as a script says; the first answer to each question is the plain start's."""

    def __init__(self, state: Path, faults: dict[int, Any]) -> None:
        self.state, self.admin = state, self
        self._faults, self._asked = faults, 0

    def deploy(self, text: str, file: str) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"can_snapshot": False}

    def fold(self, app: str) -> int:
        return 1

    def trace(self, app: str) -> dict[str, Any]:
        return {"starts": [{"replica": "r1", "kind": "restored", "fallback": None}]}

    def chat(self, app: str, model: str, question: str, *, max_tokens: int) -> Reply:
        self._asked += 1
        fault = self._faults.get(self._asked)
        if isinstance(fault, Exception):
            raise fault
        return Reply(fault or f"about {question}", 0.5, 1.0, "r1", 400.0)


def measured(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    faults: dict[int, Any] | None = None,
    leaks: list[dict[str, Any]] | None = None,
) -> SimpleNamespace:
    @contextmanager
    def own_instance(state: Path, purpose: str) -> Iterator[FakeInstance]:
        yield FakeInstance(tmp_path, faults or {})

    monkeypatch.setattr(bench_rounds, "own_instance", own_instance)
    monkeypatch.setattr(bench_rounds, "_leaks", lambda state: leaks or [])
    arguments = ["--state", str(tmp_path), "bench", "rounds", "--rounds", "3", "--requests", "2"]
    shown = CliRunner().invoke(main, [*arguments, "--json"])
    return SimpleNamespace(code=shown.exit_code, **json.loads(shown.stdout))


def test_when_all_is_well_every_answer_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path)
    assert (found.code, found.answers, found.wrong, found.failed) == (0, 6, 0, 0)
    assert found.kinds == {"plain": 0, "restored": 3}
    assert found.leaks == []


def test_a_wrong_answer_and_a_failed_request_are_counted_and_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faults = {4: "nonsense", 6: NagaraError("503: no supply")}
    found = measured(monkeypatch, tmp_path, faults=faults)
    assert (found.code, found.answers, found.wrong, found.failed) == (1, 5, 1, 1)
    assert any("nonsense" in example for example in found.examples)
    assert any("no supply" in example for example in found.examples)


def test_what_is_left_over_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leak = {"kind": "mount", "name": "/somewhere", "answered_by": None}
    found = measured(monkeypatch, tmp_path, leaks=[leak])
    assert found.code == 1
    assert leak in found.leaks
