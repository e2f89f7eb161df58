"""The control process as a whole: what it leaves and what it says when it cannot begin."""

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from nagara.base.errors import UsageError
from nagara.contract.node import NodeUnavailableError
from nagara.control.client import connect
from nagara.control.control import Control, Ready
from nagara.control.errors import AppFileError, ControlError, NotRunningError
from nagara.control.migrations import MIGRATIONS
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import a_machine


def never(ready: Ready) -> None:
    raise AssertionError("it must not come up")


async def test_it_says_where_it_is_for_as_long_as_it_is_there(stand: Any) -> None:
    await stand.up()
    document = json.loads((stand.folder / "control.json").read_text())
    assert document == {"url": stand.url, "pid": os.getpid()}
    assert connect(stand.folder).url == stand.url
    await stand.down()
    with pytest.raises(NotRunningError, match="not running"):
        connect(stand.folder)


async def test_the_first_key_and_the_token_stay_the_same(stand: Any) -> None:
    await stand.up()
    key, token = stand.key, (stand.folder / "admin.token").read_text()
    await stand.down()
    await stand.up()
    assert (stand.key, (stand.folder / "admin.token").read_text()) == (key, token)


async def test_keys_are_made_listed_and_deleted(stand: Any, text: Any) -> None:
    await stand.up(text())
    made = await stand.admin("POST", "/api/keys?name=mine")
    listed = (await stand.admin("GET", "/api/keys"))["keys"]
    assert [key["name"] for key in listed] == ["first", "mine"]
    assert all("key" not in key for key in listed)
    headers = {"Authorization": f"Bearer {made['key']}"}
    assert (await stand.get("/smol/health", headers=headers))[0] == 200
    await stand.admin("DELETE", f"/api/keys/{made['id']}")
    assert (await stand.get("/smol/health", headers=headers))[0] == 401
    await stand.down()
    await stand.up()
    assert (await stand.get("/smol/health", headers=headers))[0] == 401
    assert (await stand.get("/smol/health"))[0] == 200


async def test_deployed_apps_survive_a_restart(stand: Any, text: Any) -> None:
    await stand.up(text("one"), text("two"))
    await stand.deploy(text("one", port="9"))
    await stand.down()
    await stand.up()
    apps = (await stand.admin("GET", "/api/apps"))["apps"]
    assert [(app["name"], app["version"]) for app in apps] == [("one", 2), ("two", 1)]


async def test_a_port_in_use_is_said(stand: Any, node: FakeNode, tmp_path: Path) -> None:
    await stand.up()
    port = int(stand.url.rpartition(":")[2])
    second = Control(tmp_path / "other", node, a_machine(1), port=port)
    with pytest.raises(ControlError, match="cannot listen") as caught:
        await second.run(never)
    assert caught.value.where == f"127.0.0.1:{port}"


async def test_a_wrong_first_app_file_is_said(node: FakeNode, tmp_path: Path) -> None:
    with pytest.raises(AppFileError, match=r"app\.a\.image: this key is required"):
        await Control(tmp_path, node, a_machine(1)).run(never, app_file=("[app.a]\n", "f.toml"))
    text = '[app.a]\nimage = "host"\ncommand = ["x"]\nmodels = ["m"]\n'
    with pytest.raises(UsageError, match="there is no model 'm'"):
        await Control(tmp_path, node, a_machine(1)).run(never, app_file=(text, "f.toml"))


async def test_an_unreachable_node_is_said(node: FakeNode, tmp_path: Path) -> None:
    node.is_reachable = False
    with pytest.raises(NodeUnavailableError):
        await Control(tmp_path, node, a_machine(1)).run(never)


async def test_a_state_of_a_newer_version_is_left_alone(node: FakeNode, tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "control.db")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(ControlError, match="this nagara knows"):
        await Control(tmp_path, node, a_machine(1)).run(never)


def test_an_unknown_way_of_authentication_is_refused(node: FakeNode, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="auth must be"):
        Control(tmp_path, node, a_machine(1), auth="no")
