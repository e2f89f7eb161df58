"""What is shipped: the wheel, the source archive, units, the DaemonSet."""

import configparser
import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import jsonschema
import pytest
import yaml

from nagara.image.models import ModelFolder

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source archive of these sources."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=170)
    return folder


def test_the_wheel_has_everything_that_is_read_at_run_time(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    for path in (source / "nagara").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so":
            assert str(path.relative_to(source)) in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)


def test_the_source_archive_can_be_built_from(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    needed = {
        "pyproject.toml", "README.md", "LICENSE", "Makefile", "packaging/Containerfile",
        "tests/page/vendor/axe-core.LICENSE", "CHANGELOG.md", "SECURITY.md",
    }  # fmt: skip
    assert needed - names == set()
    assert not any(name.startswith((".state", ".venv", "build/")) for name in names)


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel alone."""
    (wheel,) = built.glob("*.whl")
    fresh = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(fresh, with_pip=False, symlinks=True)
    (packages,) = fresh.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    return fresh


def test_the_wheel_runs_where_only_its_dependencies_are(fresh: Path, tmp_path: Path) -> None:
    for name in ("aiohttp", "click", "pydantic", "rich"):  # and what they need: all but nagara
        __import__(name)
    paths = [each for each in sys.path if each.endswith("site-packages")]
    code = f"import sys; sys.path += {paths!r}; from nagara.cli.main import main; main()"
    for arguments in (["version"], ["doctor", "--json"], ["errors", "--json"]):
        command = [str(fresh / "bin/python"), "-c", code, "--state", str(tmp_path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
        assert done.returncode == 0, done.stderr
    found = subprocess.run(
        [str(fresh / "bin/python"), "-c", f"import sys; sys.path += {paths!r}; import nagara; "
         "print(nagara.__file__)"], capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.startswith(str(fresh))


def test_the_engine_of_an_installed_wheel_serves(fresh: Path, smollm2: ModelFolder) -> None:
    paths = [each for each in sys.path if each.endswith("site-packages")]
    code = f"import sys; sys.path += {paths!r}; from nagara.cli.main import main; main()"
    command = [str(fresh / "bin/python"), "-c", code, "engine", "serve", str(smollm2.path)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # until it is ready, or has ended
            said.append(line)
            if line.startswith("ready after"):
                break
        assert said[-1].startswith("ready after"), said
        body = json.dumps({"model": "smollm2", "prompt": "The capital of France is",
                           "max_tokens": 1, "temperature": 0})  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == " Paris"
        connection.close()
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_page_of_an_installed_wheel_is_whole(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    index = archive.read("nagara/control/page_files/index.html").decode()
    for name in re.findall(r'"/-/([\w.]+)"', index):
        script = archive.read(f"nagara/control/page_files/{name}").decode()
        for imported in re.findall(r'from "\./([\w.]+)"', script):
            assert f"nagara/control/page_files/{imported}" in archive.namelist()


def read_unit(name: str) -> configparser.RawConfigParser:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(PACKAGING / "systemd" / name)
    return unit


def test_units_name_commands_and_options_that_there_are() -> None:
    from nagara.cli.main import main

    for name in ("nagara-agent.service", "nagara-control.service"):
        program, *arguments = read_unit(name)["Service"]["ExecStart"].split()
        assert program == "/opt/nagara/bin/nagara"
        state, folder, words, *rest = arguments
        assert (state, folder) == ("--state", "/var/lib/nagara")
        ctx = main.make_context("nagara", [state, folder, words])
        command = main.get_command(ctx, words)
        assert command is not None
        command.make_context(words, rest, parent=ctx)


@pytest.mark.parametrize("name", ["nagara-agent.service", "nagara-control.service"])
def test_systemd_finds_nothing_wrong_with_units(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = (PACKAGING / "systemd" / name).read_text()
    there = tmp_path / name
    there.write_text(unit.replace("/opt/nagara/bin/nagara", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(there)], capture_output=True, text=True, check=False
    )
    wrong = [line for line in done.stderr.splitlines() if name in line and "nagara-agent.service: "
             "Failed to" not in line and "user 'nagara'" not in line]  # fmt: skip
    assert wrong == []


def capabilities_of_the_daemon_set() -> tuple[set[str], dict[str, object]]:
    (document,) = yaml.safe_load_all((PACKAGING / "kubernetes" / "agent.yaml").read_text())
    (container,) = document["spec"]["template"]["spec"]["containers"]
    rights = container["securityContext"]["capabilities"]
    assert rights["drop"] == ["ALL"]
    assert container["securityContext"].get("privileged") is None
    return set(rights["add"]), container


def schema_faults(document: object) -> list[str]:
    schema = json.loads((Path(__file__).parent / "vendor/kubernetes-daemonset.json").read_text())
    faults = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{fault.json_path}: {fault.message}" for fault in faults]


def test_the_daemon_set_is_one_for_kubernetes() -> None:
    (document,) = yaml.safe_load_all((PACKAGING / "kubernetes" / "agent.yaml").read_text())
    assert schema_faults(document) == []
    (container,) = document["spec"]["template"]["spec"]["containers"]
    container["arguments"] = container.pop("args")
    del container["volumeMounts"][0]["mountPath"]
    assert len(schema_faults(document)) == 2


def test_unit_and_daemon_set_have_the_same_rights_and_replicas_no_more() -> None:
    from nagara.sandbox.bundle import CAPABILITIES

    added, container = capabilities_of_the_daemon_set()
    unit = read_unit("nagara-agent.service")["Service"]["CapabilityBoundingSet"].split()
    assert {f"CAP_{name}" for name in added} == set(unit)
    assert set(CAPABILITIES) <= set(unit)
    assert container["args"][0] == "agent"  # type: ignore[index]


@pytest.mark.root
def test_with_these_rights_alone_the_machine_can_do_all_that_it_can(
    tmp_path: Path, state_dir: Path
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    (tmp_path / "tools").symlink_to((state_dir / "tools").resolve())
    added, _ = capabilities_of_the_daemon_set()
    doctor = [sys.executable, "-P", "-m", "nagara.cli.main", "--state", str(tmp_path),
              "doctor", "--json"]  # fmt: skip

    def found(*before: str) -> dict[str, str]:
        done = subprocess.run([*before, *doctor], capture_output=True, timeout=170, check=True)
        return {each["name"]: each["status"] for each in json.loads(done.stdout)["capabilities"]}

    have = subprocess.run(["setpriv", "--dump"], capture_output=True, text=True, check=True).stdout
    bounds = re.search(r"Capability bounding set: (.*)", have)
    assert bounds is not None
    kept = ",".join(
        ["-all", *(f"+{name.lower()}" for name in sorted(added) if name.lower() in bounds[1])]
    )
    assert found("setpriv", "--bounding-set", kept) == found()
