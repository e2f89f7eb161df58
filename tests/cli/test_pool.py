"""`nagara pool` against a running nagara, and where it needs none."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nagara.cli.main import main
from nagara.control.control import Control
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import a_machine


def nagara(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--state", str(state), "pool", *arguments])


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A running control process with four slots of its own."""
    is_up = threading.Event()
    stop: list[Callable[[], None]] = []

    async def serve() -> None:
        node = FakeNode()
        control = Control(tmp_path, node, a_machine(4))
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(control.stop))
        await control.run(lambda _: is_up.set())
        await node.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(10)
    yield tmp_path
    stop[0]()
    thread.join(10)
    assert not thread.is_alive()


def own(state: Path) -> str:
    document = json.loads(nagara(state, "status", "--json").stdout)
    (machine,) = document["machines"]
    return str(machine["name"])


def test_status_lists_machines_and_figures(state: Path) -> None:
    done = nagara(state, "status")
    assert done.exit_code == 0, done.output
    assert f"{own(state)} " in done.stdout
    assert "0/4 any" in done.stdout
    assert "level 4" in done.stderr
    document = json.loads(nagara(state, "status", "--json").stdout)
    assert document["machines"][0]["state"] == "ready"
    assert {"level", "target", "claims", "misses", "utilisation", "idle_cost_h"} <= set(document)


def test_a_machine_is_drained_resumed_and_diagnosed(state: Path) -> None:
    name = own(state)
    assert nagara(state, "drain", name).output == f"{name}: draining\n"
    assert "drained by hand" in nagara(state, "status").output
    assert json.loads(nagara(state, "status", "--json").stdout)["level"] == 0
    assert nagara(state, "drain", name, "--resume").output == f"{name}: ready\n"
    answer = json.loads(nagara(state, "diagnose", name, "--json").stdout)
    assert answer == {"machine": name, "state": "diagnosing"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("drain", "nobody"), "no machine is called 'nobody'"),
        (("drain", "OWN", "--resume"), "cannot have: resume"),
        (("diagnose", "OWN", "--kind", "boot"), "kind must be medium or heavy"),
    ],
)
def test_an_order_that_cannot_be_followed_is_refused(
    state: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = nagara(state, *(own(state) if one == "OWN" else one for one in arguments))
    assert done.exit_code != 0
    assert said in done.output


def test_a_pool_of_one_machine_has_nothing_to_plan(state: Path) -> None:
    assert "nothing to do" in nagara(state, "plan").output
    assert "no plan" in nagara(state, "explain").output
    assert json.loads(nagara(state, "explain", "--json").stdout)["source"] == "none"


def test_a_pool_file_is_planned_without_a_running_nagara(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("[provider.here]\nkind = 'local'\nslots = 4\n[[demand]]\nslots = 2\n")
    done = nagara(tmp_path, "plan", "--file", str(file), "--json")
    assert json.loads(done.stdout)["launches"] == [["local", 1]]
    assert "Launch 1 machine" in nagara(tmp_path, "explain", "--file", str(file)).output


@pytest.mark.parametrize(
    "command", [("status",), ("plan",), ("explain",), ("drain", "m"), ("diagnose", "m")]
)
def test_without_a_running_nagara_every_command_says_what_to_do(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = nagara(tmp_path, *command)
    assert done.exit_code == 3
    assert "nagara is not running here" in done.output
    assert "nagara up" in done.output


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
