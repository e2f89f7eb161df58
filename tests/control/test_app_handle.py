"""`nagara.App`, against a real control process over a fake node."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nagara
from nagara.control.app_handle import to_toml
from nagara.control.appfile import parse_apps

KEYS: dict[str, Any] = {"image": "host", "command": ["serve", "${PORT}"]}


async def test_an_app_is_deployed_changed_taken_back_and_deleted(stand: Any) -> None:
    await stand.up()

    def use() -> None:
        app = nagara.App("smol", state=stand.folder, **KEYS, scale={"max": 2}, env={"A": 'é"\\\n'})
        assert app.deploy() == 1
        assert app.url == f"{stand.url}/smol"
        assert nagara.App("smol", state=str(stand.folder), **KEYS, port=9).deploy() == 2
        assert app.rollback() == 1
        assert app.status()["scale"] == {"min": 0, "max": 2}
        app.delete()
        with pytest.raises(nagara.UnknownAppError):
            app.status()
        with pytest.raises(nagara.UnknownAppError):
            app.delete()

    await asyncio.to_thread(use)


def test_every_fault_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(nagara.AppFileError) as caught:
        nagara.App("Smol", state=tmp_path, image="nowhere:x", command=["x"], prot=1)
    assert len(caught.value.problems) == 3
    with pytest.raises(nagara.NagaraError, match="cannot stand in an app file"):
        nagara.App("smol", state=tmp_path, **KEYS, env={"A": object()})


def test_errors_have_a_type_each(tmp_path: Path) -> None:
    app = nagara.App("smol", state=tmp_path, **KEYS)
    with pytest.raises(nagara.NotRunningError):
        app.deploy()
    assert issubclass(nagara.NotRunningError, nagara.NagaraError)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        nagara.Nothing  # type: ignore[attr-defined]  # noqa: B018


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_text_arrives_as_it_was(values: list[str]) -> None:
    env = {f"V{n}": value.replace("\0", "") for n, value in enumerate(values)}
    (app,) = parse_apps(to_toml("a", {**KEYS, "env": env}), "f")
    assert dict(app.env) == env


def test_importing_the_package_loads_nothing_else() -> None:
    code = "import sys, nagara; print([m for m in sys.modules if m.startswith(('nagara.', 'torch', 'aiohttp', 'pydantic'))])"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
