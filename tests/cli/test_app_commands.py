"""`nagara deploy`, `apps`, `logs`, `trace`, `delete` against a control process in this one."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nagara import __version__
from nagara.cli.logs import news
from nagara.cli.machines import _row
from nagara.cli.main import main
from nagara.contract.replica import FilesReport, TierRead
from nagara.control.client import connect
from nagara.control.control import Control, Ready
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import a_machine

Command = Callable[..., Result]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def node(state: Path) -> Iterator[FakeNode]:
    """A running control process; the fake node behind it."""
    is_up = threading.Event()
    stop: list[Callable[[], None]] = []
    nodes: list[FakeNode] = []

    async def serve() -> None:
        nodes.append(FakeNode())
        nodes[0].scripts["bad"].always_fails = "boom [1]"
        control = Control(state, nodes[0], a_machine(4))
        loop = asyncio.get_running_loop()
        stop.append(lambda: loop.call_soon_threadsafe(control.stop))

        def ready(what: Ready) -> None:
            is_up.set()

        await control.run(ready)
        await nodes[0].close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_up.wait(10)
    yield nodes[0]
    stop[0]()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def nagara(state: Path) -> Command:
    def call(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["--state", str(state), *arguments])

    return call


@pytest.fixture
def app_file(tmp_path: Path) -> Path:
    file = tmp_path / "apps.toml"
    tables = [f'[app.{name}]\nimage = "host"\ncommand = ["x"]\n' for name in ("smol", "bad")]
    file.write_text("".join(tables))
    return file


def call(state: Path, app: str) -> int:
    """One request to the app."""
    import http.client
    from urllib.parse import urlsplit

    address = urlsplit(connect(state).url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    key = (state / "api.key").read_text().strip()
    connection.request("GET", f"/{app}/health", headers={"Authorization": f"Bearer {key}"})
    status = connection.getresponse().status
    connection.close()
    return status


def starts_of(nagara: Command, app: str) -> list[dict[str, Any]]:
    """The starts that are recorded, when there is one: it may be after the first answer."""
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        if starts := json.loads(nagara("trace", app, "--json").stdout)["starts"]:
            return list(starts)
        time.sleep(0.01)
    raise TimeoutError(f"no start of {app} was recorded")


@pytest.mark.parametrize("command", [["apps"], ["logs", "x"], ["trace", "x"], ["delete", "x"]])
def test_without_a_running_nagara_the_command_says_how_to_start_it(
    nagara: Command, command: list[str]
) -> None:
    result = nagara(*command)
    assert result.exit_code == 3
    assert "nagara is not running here" in result.stderr
    assert "nagara up" in result.stderr


def test_from_deployment_to_deletion(
    nagara: Command, node: FakeNode, state: Path, app_file: Path
) -> None:
    assert "nothing is deployed" in nagara("apps").stderr
    deployed = nagara("deploy", str(app_file))
    assert deployed.exit_code == 0
    assert "smol version 1: http://127.0.0.1:" in deployed.stdout
    assert "no start of smol has ended yet" in nagara("trace", "smol").stderr

    assert call(state, "smol") == 200
    assert call(state, "bad") == 503
    listing = nagara("apps").stdout
    assert "1 ready (max 4)" in listing
    assert "at zero (max 4)" in listing
    assert "2 failures in a row" in listing
    names = [app["name"] for app in json.loads(nagara("apps", "--json").stdout)]
    assert names == ["smol", "bad"]

    log = nagara("logs", "smol")
    assert "GET /health" in log.stdout
    assert "log of smol-" in log.stderr
    assert "boom [1]" in nagara("logs", "bad").stdout

    (start,) = starts_of(nagara, "smol")
    shown = nagara("trace", "smol").stdout
    assert "plain" in shown
    assert "unaccounted" in shown
    assert "plain" in nagara("trace", start["replica"]).stdout
    assert len(starts_of(nagara, "bad")) >= 1
    assert "boom [1]" in nagara("trace", "bad").stdout

    assert nagara("delete", "smol").exit_code == 0
    assert node.live == {}
    gone = nagara("delete", "smol")
    assert gone.exit_code == 2
    assert "no app 'smol' is deployed" in gone.stderr


def test_a_wrong_file_is_refused_with_all_its_faults(
    nagara: Command, node: FakeNode, tmp_path: Path
) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('[app.a]\nimage = "host"\nport = "x"\n')
    result = nagara("deploy", str(file))
    assert result.exit_code == 2
    assert f"{file}: 2 problems" in result.stderr
    assert "app.a.command: this key is required" in result.stderr
    assert nagara("deploy", str(tmp_path / "none.toml")).exit_code == 2


def test_a_model_that_is_not_there_is_refused_at_once(
    nagara: Command, node: FakeNode, tmp_path: Path
) -> None:
    file = tmp_path / "apps.toml"
    file.write_text('[app.a]\nimage = "host"\ncommand = ["x"]\nmodels = ["m"]\n')
    result = nagara("deploy", str(file))
    assert result.exit_code == 2
    assert "there is no model 'm'" in result.stderr


def test_following_prints_only_what_is_new() -> None:
    assert news(b"", b"ab") == b"ab"
    assert news(b"ab\n", b"ab\ncd\n") == b"cd\n"
    assert news(b"x" * 9000 + b"1\n", b"x" * 5000 + b"1\n2\n") == b"2\n"
    assert news(b"old\n", b"entirely other\n") == b"entirely other\n"


def test_an_image_is_brought_at_deployment_and_the_version_names_its_tree(
    nagara: Command, node: FakeNode, state: Path, tmp_path: Path
) -> None:
    file = tmp_path / "image.toml"
    file.write_text('[app.smol]\nimage = "dir:/srv/app"\ncommand = ["x"]\n')
    refused = nagara("deploy", str(file))
    assert refused.exit_code == 2
    assert "dir:/srv/app" in refused.stderr
    assert "nothing is deployed" in nagara("apps").stderr

    node.images["dir:/srv/app"] = "first.1"
    node.files = FilesReport(
        "dir",
        "lazy",
        objects=900,
        size_bytes=2_000_000,
        read_objects=90,
        read_bytes=1_000_000,
        prefetched_objects=40,
        prefetched_bytes=500_000,
        tiers=(TierRead("local", 50, 600_000), TierRead("zone", 40, 400_000)),
    )
    assert nagara("deploy", str(file)).exit_code == 0
    assert call(state, "smol") == 200
    (replica,) = node.live.values()
    assert replica.order.spec.image_index == "first.1"
    assert len(starts_of(nagara, "smol")) == 1
    shown = " ".join(nagara("trace", "smol").stdout.split())
    assert "dir image, 900 objects, 2 MB" in shown
    assert "read 90 objects, 1 MB (50%)" in shown
    assert "40 objects, 400 kB from zone" in shown
    assert "40 objects, 500 kB ahead of need" in shown

    assert nagara("deploy", str(file)).stdout.startswith("smol version 2")
    assert len(node.live) == 1  # the same tree: its replicas stay
    node.images["dir:/srv/app"] = "second.1"
    assert nagara("deploy", str(file)).exit_code == 0
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:  # the old one answers until a new one is ready
        assert call(state, "smol") == 200
        if [each.order.spec.image_index for each in node.live.values()][-1:] == ["second.1"]:
            return
        time.sleep(0.01)
    raise TimeoutError("the new version does not come")


def test_machines_are_listed_with_what_runs_there(nagara: Command, node: FakeNode) -> None:
    shown = nagara("machines")
    assert "machine" in shown.stdout
    assert "ready" in shown.stdout
    assert "here" in shown.stdout
    (machine,) = json.loads(nagara("machines", "--json").stdout)
    assert machine["version"] == __version__
    assert (machine["leased"], machine["devices"]) == (0, 4)
    assert "heard_ago_s" in machine


def test_what_is_wrong_with_a_machine_is_in_its_row() -> None:
    machine: dict[str, Any] = {
        "name": "p-1", "address": "tcp://m1:9300", "state": "ready", "leased": 1, "devices": 2,
        "heard_ago_s": 2.4, "version": "0.1.0", "reason": "", "kept_out": ["unknown code 99"],
        "is_silent": True,
        "checks": {"kind": "boot", "results": [
            {"name": "disk", "outcome": "fail", "detail": "5 MB/s"},
            {"name": "memory", "outcome": "pass", "detail": ""},
        ]},
    }  # fmt: skip
    assert _row(machine) == (
        "p-1", "tcp://m1:9300", "ready", "1/2", "2 s ago", "0.1.0",
        "unknown code 99; does not answer; disk: 5 MB/s",
    )  # fmt: skip
    machine |= {"kept_out": [], "is_silent": False, "heard_ago_s": None, "version": ""}
    machine["checks"]["results"].pop(0)
    assert _row(machine)[4:] == ("not yet", "?", "boot checks passed")
    assert _row({**machine, "checks": None})[6] == "not checked"
