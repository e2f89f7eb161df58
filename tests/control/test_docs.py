"""The documentation and the code name the same keys, routes and refusals."""

import re
from pathlib import Path

import pytest

from nagara.control.api import Api
from nagara.control.appfile import _TABLES, parse_apps
from nagara.control.presets import PRESETS
from nagara.control.watch_api import WatchApi

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "apps.md").read_text()
POOL_PAGE = (ROOT / "docs" / "pool.md").read_text()


def test_the_examples_can_be_deployed() -> None:
    examples = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    apps = [parse_apps(example, "docs/apps.md") for example in examples]
    assert [[app.name for app in found] for found in apps] == [["smol"], ["files"], ["smol"]]


def test_the_example_of_the_page_on_snapshots_can_be_deployed() -> None:
    page = (ROOT / "docs" / "snapshots.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (app,) = parse_apps(example, "docs/snapshots.md")
    assert [step.path for step in app.hooks.after] == [None, "/admin/resume"]
    for preset in PRESETS:
        assert f'"{preset}"' in PAGE, preset


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_example_files_can_be_deployed(file: Path) -> None:
    assert parse_apps(file.read_text(), file.name)


def test_every_key_is_documented() -> None:
    plain = ("app.*", "canary", "snapshot", "before", "after")
    for table, model in _TABLES.items():
        for key in model.model_fields:
            if key in ("scale", "limits", "timeouts"):
                continue  # a table, or a key with no choice yet
            name = key if table in plain else f"{table}.{key}"
            assert re.search(rf"\b{re.escape(name)}\b", PAGE), name


def test_every_route_of_the_api_is_documented() -> None:
    none: object = None
    watch = WatchApi(none, none)  # type: ignore[arg-type]
    api = Api(*[none] * 7, watch)  # type: ignore[arg-type]
    for _, pattern, _ in api.routes:
        path = re.sub(r"\(\?P<(\w+)>[^)]*\)", lambda match: match[1].upper(), pattern.pattern)
        path = path.replace("machines/NAME", "machines/MACHINE").replace("/NAME", "/APP")
        assert path in PAGE + POOL_PAGE, path


def test_every_refusal_is_documented() -> None:
    codes = set()
    for file in (ROOT / "src" / "nagara" / "control").glob("*.py"):
        codes |= set(re.findall(r'code="(\w+)"', file.read_text()))
    rare = {"bad_request", "too_large", "slow_body", "not_recorded",
            "method_not_allowed", "websocket_refused",
            "unreachable", "stopping"}  # fmt: skip
    assert {code for code in codes - rare if f"`{code}`" not in PAGE} == set()
