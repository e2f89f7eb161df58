"""`nagara bench coldstart`: what it refuses, and the app files it measures."""

import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.cli.example_app import vllm_app
from nagara.cli.main import main
from nagara.contract.replica import SnapshotHooks
from nagara.control.appfile import parse_apps


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--app", "vllm", "--compile"], "compiles by default"),
        (["--eager"], "--eager and --python are for --app vllm"),
        (["--app", "vllm"], "environments/vllm/bin/python"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: list[str], said: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["--state", str(tmp_path), "bench", "coldstart", *options])
    assert done.exit_code != 0
    assert said in done.output


@pytest.mark.parametrize("eager", [False, True])
def test_vllm_is_deployed_as_its_user_would_with_a_canary_and_its_caches(eager: bool) -> None:
    text = vllm_app("v", "m", Path("/opt/v/bin/python"), compile_cache="/var/c", eager=eager)
    (app,) = parse_apps(text, "f")
    assert app.canary.is_openai
    assert ("--enforce-eager" in app.command) == eager
    assert dict(app.env)["VLLM_CACHE_ROOT"] == "/var/c/vllm"
    assert app.hooks == SnapshotHooks(in_python=True)
    assert tomllib.loads(text)["app"]["v"]["models"] == ["m"]
