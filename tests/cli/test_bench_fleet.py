"""`nagara bench fleet`: all replicas of the simulated machines come up, and figures are printed."""

import json

from click.testing import CliRunner

from nagara.cli.main import main


def test_a_small_fleet_comes_up_and_is_measured() -> None:
    command = ["bench", "fleet", "--machines", "20", "--replicas", "60", "--seconds", "3", "--json"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["simulated"] is True
    assert (figures["machines"], figures["replicas"]) == (20, 60)
    assert figures["decisions"] >= 1
    assert 0 < figures["commits_per_start"] < 20
    assert figures["commits_per_s"] < 5, "a fleet at rest writes its state again and again"


def test_more_replicas_than_slots_are_refused() -> None:
    done = CliRunner().invoke(main, ["bench", "fleet", "--machines", "2", "--replicas", "60"])
    assert done.exit_code == 2
    assert "too many replicas" in done.output
