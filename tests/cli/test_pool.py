import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nagara.cli.main import main
from nagara.pool.demandclass import ANY
from nagara.pool.fairness import Claimant
from nagara.pool.ledger import SqliteLedger
from nagara.testing.pools import a_core, an_offering, make_ready


def nagara(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--state", str(state), "pool", *arguments])


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A pool's record with one ready machine, one lease, a plan."""
    ledger = SqliteLedger(tmp_path / "pool.db")
    core = a_core()
    make_ready(core, an_offering())
    core.claim(Claimant("app"), ANY, 0.0)
    ledger.write(core.take_writes())
    ledger.put_fact("plan", {
        "launches": [["a", 2]], "releases": [["b", 1]], "shortages": [["any device", 1.5]],
        "words": ["Launch 2 machines."],
    })  # fmt: skip
    ledger.put_fact("figures", {"level": 1, "target": 3.5})
    ledger.close()
    return tmp_path


def test_status_lists_machines_and_figures(state: Path) -> None:
    done = nagara(state, "status")
    assert done.exit_code == 0, done.output
    assert "n0-0" in done.output
    assert "1/2 h100" in done.output
    document = json.loads(nagara(state, "status", "--json").stdout)
    assert document["machines"][0]["leased"] == 1
    assert document["target"] == 3.5


def test_plan_and_explain_show_the_latest_plan(state: Path) -> None:
    text = nagara(state, "plan").output
    assert "launch      2  a" in text
    assert "release     1  b" in text
    assert "short" in text
    assert nagara(state, "explain").output == "Launch 2 machines.\n"


def test_a_pool_file_is_planned_without_a_running_pool(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("[provider.here]\nkind = 'local'\nslots = 4\n[[demand]]\nslots = 2\n")
    done = nagara(tmp_path, "plan", "--file", str(file), "--json")
    assert json.loads(done.stdout)["launches"] == [["local", 1]]
    assert "Launch 1 machine" in nagara(tmp_path, "explain", "--file", str(file)).output


def test_a_drain_is_left_as_an_order(state: Path) -> None:
    assert "drain ordered" in nagara(state, "drain", "n0-0").output
    ledger = SqliteLedger(state / "pool.db")
    assert [(one.machine, one.what) for one in ledger.orders()] == [("n0-0", "drain")]
    ledger.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drain", "nobody"), "no machine is called 'nobody'"),
        (("drain", "n0-0", "--resume"), "it is ready, not draining"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(
    state: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = nagara(state, *arguments)
    assert done.exit_code == 1
    assert said in done.output


@pytest.mark.parametrize("command", ["status", "plan", "explain"])
def test_without_a_pool_every_command_says_what_to_do(tmp_path: Path, command: str) -> None:
    done = nagara(tmp_path, command)
    assert done.exit_code == 1
    assert "there is no pool here yet" in done.output
    assert "hint:" in done.output


def test_a_short_simulation_prints_one_json_object_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "week.svg"
    done = nagara(
        tmp_path, "simulate", "--days", "0.1", "--apps", "2", "--claims-per-hour", "30",
        "--no-variants", "--json", "--plot", str(picture),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert {"nagara", "machine", "command", "policies", "grids", "demand"} <= set(document)
    assert picture.read_text().startswith("<svg")


def test_only_svg_is_drawn(tmp_path: Path) -> None:
    assert nagara(tmp_path, "simulate", "--plot", "week.gif").exit_code == 2


def test_diagnose_prints_every_check_and_its_outcome(tmp_path: Path) -> None:
    done = nagara(tmp_path, "diagnose", "--json")
    document = json.loads(done.stdout)
    names = [one["name"] for one in document["results"]]
    assert {"memory", "disk", "clock", "mounts", "kernel log"} <= set(names)
    assert done.exit_code == any(one["outcome"] == "fail" for one in document["results"])
