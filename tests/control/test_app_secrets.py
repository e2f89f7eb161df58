"""Values of secrets: kept as files, and given to the replicas that may have them."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nagara.base.errors import UsageError
from nagara.cli.main import main
from nagara.contract.node import StartFailedError
from nagara.contract.replica import (
    Canary,
    CaptureOrder,
    Lease,
    ReplicaSpec,
    SnapshotRules,
    StartOrder,
)
from nagara.control.app_secrets import AppSecrets
from nagara.control.machines import Machines

LEASE = Lease("slot", 1)
SPEC = ReplicaSpec(
    tenant="default", app="app", definition="d", image="host", command=("x",), port=80,
    ready_path="/", canary=Canary("/"), secret_names=("TOKEN", "KEY"),
)  # fmt: skip


class Recorder:
    """A node, and a pool that knows no machine but its own, which keep what they are asked."""

    def __init__(self) -> None:
        self.asked: list[ReplicaSpec] = []

    async def start(self, order: StartOrder) -> None:
        self.asked.append(order.spec)

    async def capture(self, order: CaptureOrder) -> None:
        self.asked.append(order.spec)

    def machine_of(self, lease: Lease) -> None:
        return None


def test_values_are_files_of_their_owner_alone(tmp_path: Path) -> None:
    kept = AppSecrets(tmp_path)
    kept.put("default", "TOKEN", "first")
    kept.put("default", "TOKEN", "second")
    file = tmp_path / "secrets/default/TOKEN"
    assert file.read_text() == "second"
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent, file.parent.parent)] == [
        0o600, 0o700, 0o700,
    ]  # fmt: skip
    assert kept.names("default") == ["TOKEN"]
    assert kept.names("other") == []
    kept.remove("default", "TOKEN")
    with pytest.raises(UsageError, match="no secret 'TOKEN' is set"):
        kept.remove("default", "TOKEN")


@pytest.mark.parametrize("name", ["", "../up", "a b", "1st", "a/b", "x" * 64])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="not a name of a secret"):
        AppSecrets(tmp_path).put("default", name, "value")


@pytest.mark.parametrize("value", ["", "a\0b", "x" * 70000])
def test_a_value_that_no_variable_can_have_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match="1 to 65536 bytes"):
        AppSecrets(tmp_path).put("default", "TOKEN", value)


async def test_replicas_that_serve_get_them_and_those_that_are_saved_do_not(tmp_path: Path) -> None:
    kept = AppSecrets(tmp_path)
    kept.put("default", "TOKEN", "t")
    kept.put("default", "KEY", "k")
    both = Recorder()
    machines = Machines(both, both, lambda _: both, kept.values)  # type: ignore[arg-type]
    allowed = replace(SPEC, rules=SnapshotRules(with_secrets=True))
    await machines.start(StartOrder("r1", LEASE, SPEC))
    await machines.capture(CaptureOrder("r2", LEASE, SPEC))
    await machines.capture(CaptureOrder("r3", LEASE, allowed))
    given = (("TOKEN", "t"), ("KEY", "k"))
    assert [spec.secrets for spec in both.asked] == [given, (), given]


async def test_a_secret_that_is_not_set_is_named_with_the_way_to_set_it(tmp_path: Path) -> None:
    both = Recorder()
    values = AppSecrets(tmp_path).values
    machines = Machines(both, both, lambda _: both, values)  # type: ignore[arg-type]
    with pytest.raises(StartFailedError, match="its secret TOKEN is not set") as failure:
        await machines.start(StartOrder("r1", LEASE, SPEC))
    assert failure.value.hint == "nagara secret set TOKEN"
    assert both.asked == []


def test_the_command_sets_lists_and_removes(tmp_path: Path) -> None:
    def run(*words: str, says: str | None = None) -> str:
        done = CliRunner().invoke(main, ["--state", str(tmp_path), "secret", *words], input=says)
        assert done.exit_code == 0, done.output
        return done.output

    run("set", "TOKEN", says="of two\nlines\n")
    assert AppSecrets(tmp_path).values("default", ("TOKEN",)) == (("TOKEN", "of two\nlines"),)
    assert run("ls") == "TOKEN\n"
    run("rm", "TOKEN")
    assert run("ls") == ""
