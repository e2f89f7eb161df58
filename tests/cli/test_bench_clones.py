"""`nagara bench clones`: what it counts as one start and as many, and what it refuses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nagara.cli import bench_clones
from nagara.cli.instance import Reply
from nagara.cli.main import main
from nagara.control.appfile import parse_apps


class FakeInstance:
    """Starts what `min` asks for; the starts of one round begin a second apart and take two."""

    def __init__(self, kind: str) -> None:
        self.admin = self
        self.deployed: list[str] = []
        self._kind = kind
        self._starts: list[dict[str, Any]] = []

    def deploy(self, text: str, file: str) -> None:
        self.deployed.append(text)
        (app,) = parse_apps(text, file)
        for number in range(app.scale.min):
            start = {
                "replica": f"r{len(self._starts)}",
                "kind": self._kind,
                "fallback": "a reason",
                "started_s": 100.0 + number,
                "total_s": 2.0,
            }
            self._starts.append(start)

    def status(self) -> dict[str, Any]:
        return {"can_snapshot": True}

    def wait_for_capture(self, app: str, *, timeout_s: float) -> dict[str, Any]:
        return {"state": "done"}

    def fold(self, app: str) -> None:
        pass

    def trace(self, app: str) -> dict[str, Any]:
        return {"starts": list(self._starts)}

    def chat(self, app: str, model: str, question: str, *, max_tokens: int) -> Reply:
        return Reply("Paris", 0.5, 1.0, "r0", 400.0)


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake: FakeInstance) -> Result:
    slots_asked = []

    @contextmanager
    def own_instance(state: Path, purpose: str, *, slots: int) -> Iterator[FakeInstance]:
        slots_asked.append(slots)
        yield fake

    monkeypatch.setattr(bench_clones, "own_instance", own_instance)
    arguments = ["--state", str(tmp_path), "bench", "clones", "--clones", "3", "--runs", "2"]
    shown = CliRunner().invoke(main, [*arguments, "--json"])
    assert slots_asked == [4]  # the snapshot's own replica beside them
    return shown


def test_all_ready_is_from_the_first_beginning_to_the_last_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = FakeInstance("restored")
    shown = measured(monkeypatch, tmp_path, fake)
    figures = json.loads(shown.stdout)
    assert (figures["one_ready"]["median_s"], figures["all_ready"]["median_s"]) == (2.0, 4.0)
    assert (figures["ratio"], figures["answers_equal"], figures["clones"]) == (2.0, True, 3)
    assert len({parse_apps(text, "f")[0].definition for text in fake.deployed}) == 1


def test_a_replica_that_was_not_put_back_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shown = measured(monkeypatch, tmp_path, FakeInstance("plain"))
    assert shown.exit_code == 1
    assert "was not put back: a reason" in shown.output
