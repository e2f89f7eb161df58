import json

import pytest
from click.testing import CliRunner

from nagara.cli import bench_planner
from nagara.cli.main import main


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_planner, "CASES", ((60, 0), (40, 3)))
    monkeypatch.setattr(bench_planner, "MACHINES", 400)
    monkeypatch.setattr(bench_planner, "CLAIMS", 3000)


def test_one_json_object_with_every_case_and_the_claims() -> None:
    done = CliRunner().invoke(main, ["bench", "planner", "--json", "--runs", "1"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [(one["offerings"], one["scenarios"]) for one in document["cases"]] == [
        (60, 0), (40, 3),
    ]  # fmt: skip
    for case in document["cases"]:
        assert {"build_s", "solve_s", "total_s"} <= set(case)
    assert document["claim_p99_us"] >= document["claim_p50_us"] > 0
    assert document["machines_bytes"] < 200e6


def test_the_table_says_the_same() -> None:
    done = CliRunner().invoke(main, ["bench", "planner", "--runs", "1"])
    assert "60 offerings" in done.output
    assert "claims: p50" in done.output
