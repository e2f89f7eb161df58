"""The OCI configuration of a replica."""

import json
from pathlib import Path

from nagara.sandbox.bundle import CAPABILITIES, Bind, Bundle, bound_sources


def bundle(**changes) -> Bundle:
    settings = {
        "container": "app-1",
        "control_group": "node-app-1",
        "root": Path("/state/root"),
        "command": ("serve", "--port", "8000"),
        "env": {"A": "b=c"},
        "network_namespace": Path("/proc/1/fd/7"),
    }
    return Bundle(**{**settings, **changes})


def test_command_environment_and_root_are_the_given_ones():
    config = bundle().config()
    assert config["process"]["args"] == ["serve", "--port", "8000"]
    assert config["process"]["env"] == ["A=b=c"]
    assert config["root"] == {"path": "/state/root", "readonly": False}


def test_every_namespace_is_private_and_the_network_is_joined_by_path():
    namespaces = bundle().config()["linux"]["namespaces"]
    assert {entry["type"] for entry in namespaces} == {"pid", "mount", "ipc", "uts", "network"}
    paths = {entry["type"]: entry["path"] for entry in namespaces if "path" in entry}
    assert paths == {"network": "/proc/1/fd/7"}


def test_privileges_are_given_up():
    process = bundle().config()["process"]
    assert process["noNewPrivileges"] is True
    sets = process["capabilities"]
    assert set(sets) == {"bounding", "effective", "permitted"}  # none inheritable or ambient
    assert all(names == list(CAPABILITIES) for names in sets.values())
    assert not {"CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE", "CAP_MKNOD", "CAP_NET_RAW"} & set(CAPABILITIES)


def test_binds_are_read_only_unless_said():
    binds = (Bind(Path("/a"), Path("/b")), Bind(Path("/c"), Path("/d"), is_writable=True))
    mounts = {entry["destination"]: entry for entry in bundle(binds=binds).config()["mounts"]}
    assert mounts["/b"]["source"] == "/a"
    assert "ro" in mounts["/b"]["options"]
    assert "rw" in mounts["/d"]["options"]


def test_shared_memory_is_a_file_system_of_its_own():
    mounts = {entry["destination"]: entry for entry in bundle().config()["mounts"]}
    assert mounts["/dev/shm"]["type"] == "tmpfs"


def test_the_control_group_is_below_nagaras():
    assert bundle().config()["linux"]["cgroupsPath"] == "/nagara/node-app-1"


def test_limits_appear_only_where_they_are_given():
    assert set(bundle().config()["linux"]["resources"]) == {"devices", "pids"}
    resources = bundle(cpu_cores=0.5, memory_bytes=1 << 30).config()["linux"]["resources"]
    assert resources["memory"] == {"limit": 1 << 30}
    assert resources["cpu"] == {"quota": 50_000, "period": 100_000}


def test_a_host_name_longer_than_the_kernel_takes_is_cut():
    assert bundle(container="x" * 80).config()["hostname"] == "x" * 63


def test_the_file_is_valid_json(tmp_path):
    bundle(criu_config=Path("/state/criu.conf")).write(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["annotations"] == {"org.criu.config": "/state/criu.conf"}


def test_what_a_written_bundle_shows_of_the_machine_is_listed(tmp_path: Path):
    bundle(binds=(Bind(Path("/data/models"), Path("/models")),)).write(tmp_path)
    assert bound_sources(tmp_path) == [Path("/data/models")]
