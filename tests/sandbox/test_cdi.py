"""Devices by their CDI names: what a spec file says is what the container gets."""

import json
import os
from pathlib import Path

import pytest

from nagara.sandbox import cdi
from nagara.sandbox.bundle import Bundle, User
from nagara.sandbox.cdi import CdiError, DeviceEdits, check_device_name, find_devices, parse_spec

NODE = {"path": "/dev/made0", "type": "c", "major": 511, "minor": 3}
SPEC = {
    "cdiVersion": "0.7.0",
    "kind": "made.up/gpu",
    "devices": [
        {
            "name": "0",
            "containerEdits": {
                "deviceNodes": [{**NODE, "permissions": "rw", "fileMode": 0o666, "gid": 44}],
                "env": ["MADE_UP_VISIBLE=0"],
            },
        },
        {
            "name": "all",
            "containerEdits": {"deviceNodes": [NODE, {**NODE, "path": "/dev/made1", "minor": 4}]},
        },
    ],
    "containerEdits": {
        "deviceNodes": [{**NODE, "path": "/dev/madectl", "minor": 255}],
        "mounts": [
            {"hostPath": "/usr/lib/libmade.so.1", "containerPath": "/usr/lib/libmade.so.1"},
            {"hostPath": "/run/made", "containerPath": "/run/made", "options": ["rw", "noexec"]},
        ],
        "hooks": [
            {
                "hookName": "createContainer",
                "path": "/usr/bin/made-hook",
                "args": ["made-hook", "update-ldcache"],
            }
        ],
        "additionalGids": [44],
    },
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "made.json").write_text(json.dumps(SPEC))
    return tmp_path


def config(edits: DeviceEdits):
    return Bundle("c", "g", Path("/root"), ("x",), {}, Path("/ns"), devices=edits).config()


def test_a_device_brings_its_own_and_the_common_edits(folder):
    made = config(find_devices(["made.up/gpu=0"], [folder]))
    assert made["linux"]["devices"] == [
        {"path": "/dev/madectl", "type": "c", "major": 511, "minor": 255},
        {**NODE, "fileMode": 0o666, "gid": 44},
    ]
    assert made["linux"]["resources"]["devices"] == [
        {"allow": False, "access": "rwm"},
        {"allow": True, "type": "c", "major": 511, "minor": 255, "access": "rwm"},
        {"allow": True, "type": "c", "major": 511, "minor": 3, "access": "rw"},
    ]
    assert made["process"]["env"] == ["MADE_UP_VISIBLE=0"]
    assert made["process"]["user"]["additionalGids"] == [44]
    mounts = {mount["destination"]: mount for mount in made["mounts"]}
    assert mounts["/usr/lib/libmade.so.1"]["options"] == ["bind", "ro", "nosuid", "nodev"]
    assert mounts["/run/made"]["options"] == ["bind", "rw", "noexec"]
    assert made["hooks"]["createContainer"][0]["args"] == ["made-hook", "update-ldcache"]


def test_what_two_devices_share_comes_once(folder):
    made = config(find_devices(["made.up/gpu=all", "made.up/gpu=all"], [folder]))
    paths = [device["path"] for device in made["linux"]["devices"]]
    assert paths == ["/dev/madectl", "/dev/made0", "/dev/made1"]
    assert len(made["hooks"]["createContainer"]) == 1


def test_without_devices_nothing_is_added_and_nothing_is_read(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    made = config(find_devices([], [tmp_path]))
    assert made["linux"]["devices"] == []
    assert "hooks" not in made


def test_an_unknown_device_is_refused_with_the_known_ones(folder):
    with pytest.raises(CdiError, match=r"known: made.up/gpu=0, made.up/gpu=all"):
        find_devices(["made.up/gpu=7"], [folder])
    (folder / "broken.json").write_text("{")
    with pytest.raises(CdiError, match=r"broken.json"):
        find_devices(["other.org/gpu=7"], [folder])
    assert find_devices(["made.up/gpu=0"], [folder]).nodes  # a broken neighbour does no harm


def test_a_later_folder_wins(folder, tmp_path):
    later = tmp_path / "run"
    later.mkdir()
    changed = json.loads(json.dumps(SPEC))
    changed["devices"][0]["containerEdits"]["env"] = ["MADE_UP_VISIBLE=1"]
    (later / "made.json").write_text(json.dumps(changed))
    assert find_devices(["made.up/gpu=0"], [folder, later]).env == ("MADE_UP_VISIBLE=1",)


@pytest.mark.parametrize(
    "change",
    [
        {"netDevices": []},
        {"containerEdits": {"intelRdt": {}}},
        {"containerEdits": {"deviceNodes": [{**NODE, "permissions": "rx"}]}},
        {"containerEdits": {"deviceNodes": [{"path": "/dev/is-not-there"}]}},
        {"containerEdits": {"deviceNodes": [{"path": "/etc/passwd"}]}},
        {"containerEdits": {"hooks": [{"hookName": "later", "path": "/x"}]}},
        {"containerEdits": {"mounts": [{"hostPath": "/x"}]}},
        {"devices": [{"containerEdits": {}}]},
        {"containerEdits": []},
        {"cdiVersion": "2.0.0"},
        {"cdiVersion": "0.2.0"},
        {"cdiVersion": "1.0"},
        {"cdiVersion": 1.0},
        {"kind": ["made.up/gpu"]},
        {"kind": "gpu"},
        {"devices": 5},
        {"devices": [{"name": "0"}, {"name": "1"}, {"name": "0"}]},
        {"devices": [{"name": "../0"}]},
        {"devices": [{"name": "é"}]},
        {"devices": [{"name": 0}]},
        {"containerEdits": {"env": "NAME=value"}},
        {"containerEdits": {"env": ["NAME"]}},
        {"containerEdits": {"env": ["=value"]}},
        {"containerEdits": {"env": [5]}},
        {"containerEdits": {"deviceNodes": {"path": "/dev/null"}}},
        {"containerEdits": {"deviceNodes": [{**NODE, "path": "dev/made"}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "path": "/dev/../etc/passwd"}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "type": "p"}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "major": [1]}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "minor": -1}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "fileMode": "0666"}]}},
        {"containerEdits": {"deviceNodes": [{**NODE, "uid": True}]}},
        {"containerEdits": {"hooks": [{"hookName": "prestart", "path": "x"}]}},
        {"containerEdits": {"hooks": [{"hookName": "prestart", "path": "/x", "args": "x"}]}},
        {"containerEdits": {"hooks": [{"hookName": "prestart", "path": "/x", "timeout": -1}]}},
        {"containerEdits": {"mounts": [{"hostPath": "x", "containerPath": "/x"}]}},
        {"containerEdits": {"mounts": [{"hostPath": "/x", "containerPath": "/x/../y"}]}},
        {"containerEdits": {"additionalGids": [None]}},
    ],
)
def test_what_is_not_understood_is_refused_as_a_whole(change):
    with pytest.raises(CdiError):
        parse_spec({**SPEC, **change} if change != {"containerEdits": []} else [])


def test_numbers_that_the_file_leaves_out_are_those_of_the_machine(tmp_path):
    node = {"path": "/dev/inside", "hostPath": "/dev/null"}
    spec = {"cdiVersion": "0.5.0", "kind": "made.up/x", "containerEdits": {"deviceNodes": [node]}}
    spec["devices"] = [{"name": "0", "containerEdits": {}}]
    (made,) = parse_spec(spec)[1]["0"].nodes
    real = os.stat("/dev/null").st_rdev  # noqa: PTH116
    assert (made.path, made.kind) == ("/dev/inside", "c")
    assert (made.major, made.minor) == (os.major(real), os.minor(real))


def test_nvidias_toolkit_is_asked_where_there_is_no_file(tmp_path, monkeypatch):
    spec = {**SPEC, "kind": "nvidia.com/gpu"}
    program = tmp_path / "nvidia-ctk"
    program.write_text(
        f"#!/bin/sh\n[ \"$*\" = 'cdi generate --format=json' ] && cat {tmp_path}/s\n"
    )
    program.chmod(0o755)
    (tmp_path / "s").write_text(json.dumps(spec))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_devices(["nvidia.com/gpu=0"], [tmp_path / "none"]).env == ("MADE_UP_VISIBLE=0",)
    (tmp_path / "s").unlink()
    with pytest.raises(CdiError, match="nvidia-ctk"):
        find_devices(["nvidia.com/gpu=0"], [tmp_path / "none"])


def test_yaml_is_read_where_it_can_be_and_named_where_not(tmp_path, monkeypatch):
    (tmp_path / "nvidia.yaml").write_text(json.dumps(SPEC))  # JSON is YAML
    real = cdi.importlib.import_module

    def lacking(name):
        if name == "yaml":
            raise ImportError(name)
        return real(name)

    monkeypatch.setattr(cdi.importlib, "import_module", lacking)
    with pytest.raises(CdiError, match=r"nvidia.yaml: is YAML"):
        find_devices(["made.up/gpu=0"], [tmp_path])
    yaml = type("Yaml", (), {"safe_load": staticmethod(json.loads)})
    monkeypatch.setattr(cdi.importlib, "import_module", lambda name: yaml)
    assert find_devices(["made.up/gpu=0"], [tmp_path]).env


def test_names_are_checked():
    assert check_device_name("nvidia.com/gpu=0") is None
    assert check_device_name("nvidia.com/gpu=GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76") is None
    for name in ("gpu", "nvidia.com/gpu", "a/b=", "../b=c", "a/b=c d"):
        assert check_device_name(name)


def test_what_a_machine_knows_is_told_or_why_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(cdi, "FOLDERS", (folder,))
    assert cdi.known_devices() == "made.up/gpu=0, made.up/gpu=all"
    monkeypatch.setattr(cdi, "FOLDERS", (tmp_path / "none",))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CdiError, match="no spec file"):
        cdi.known_devices()


def test_a_file_without_a_version_is_refused():
    with pytest.raises(CdiError, match="lacks 'cdiVersion'"):
        parse_spec({key: value for key, value in SPEC.items() if key != "cdiVersion"})


def test_what_two_files_of_one_folder_both_name_is_neithers(folder, tmp_path):
    changed = {**SPEC, "devices": [{"name": "0"}, {"name": "more"}]}
    (folder / "other.json").write_text(json.dumps(changed))
    with pytest.raises(CdiError, match=r"made.up/gpu=0 is in .*made.json and in .*other.json"):
        find_devices(["made.up/gpu=0"], [folder])
    assert find_devices(["made.up/gpu=all"], [folder]).nodes
    assert find_devices(["made.up/gpu=more"], [folder]).nodes
    later = tmp_path / "later"
    later.mkdir()
    (later / "made.json").write_text(json.dumps(SPEC))
    assert find_devices(["made.up/gpu=0"], [folder, later]).env == ("MADE_UP_VISIBLE=0",)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_what_is_no_spec_file_hangs_and_breaks_nothing(folder, tmp_path, suffix, monkeypatch):
    class OwnError(Exception):
        pass

    def refuse(_):
        raise OwnError("a tab")

    yaml = type("Yaml", (), {"safe_load": staticmethod(refuse), "YAMLError": OwnError})
    monkeypatch.setattr(cdi.importlib, "import_module", lambda name: yaml)
    os.mkfifo(folder / f"pipe.{suffix}")
    (folder / f"endless.{suffix}").symlink_to("/dev/zero")
    (folder / f"nowhere.{suffix}").symlink_to("nowhere")
    (folder / f"folder.{suffix}").mkdir()
    (folder / f"deep.{suffix}").write_text("[" * 100_000)
    (folder / f"bytes.{suffix}").write_bytes(b"\xff\xfe")
    with (folder / f"large.{suffix}").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CdiError) as raised:
        find_devices(["made.up/gpu=7"], [folder])
    for name in ("pipe", "endless", "nowhere", "folder", "deep", "bytes", "large"):
        assert f"{name}.{suffix}: " in str(raised.value)
    assert find_devices(["made.up/gpu=0"], [folder]).nodes


def test_a_link_to_a_spec_file_is_one(folder, tmp_path):
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/made.json").symlink_to(folder / "made.json")
    assert find_devices(["made.up/gpu=0"], [tmp_path / "linked"]).nodes


def test_variables_take_the_place_of_the_apps_and_groups_come_beside_its_own():
    edits = DeviceEdits(env=("A=device", "B=device"), groups=(44, 7))
    who = User(1000, 1000, (7, 8))
    bundle = Bundle(
        "c", "g", Path("/root"), ("x",), {"A": "app", "C": "app"}, Path("/ns"),
        user=who, devices=edits,
    )  # fmt: skip
    process = bundle.config()["process"]
    assert process["env"] == ["C=app", "A=device", "B=device"]
    assert process["user"]["additionalGids"] == [7, 8, 44]
