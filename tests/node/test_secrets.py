"""Secrets of apps: given to replicas that serve, and in no snapshot unless the app allows it."""

import dataclasses
import secrets
from pathlib import Path

import pytest

from nagara.contract.node import NodeError
from nagara.contract.replica import SnapshotRules, StartKind

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

FIRST = "at_start = os.environ.get('TOKEN')"
SEEN = """
file = "/run/nagara/secrets/TOKEN"
has_file = os.path.exists(file)
answer = [
    at_start, os.environ.get("TOKEN"), open(file).read() if has_file else None,
    [oct(os.stat(path).st_mode & 0o777) for path in (file, os.path.dirname(file))],
]
"""


@pytest.fixture
def value():
    return secrets.token_hex(24)


def kept(state: Path, value: str) -> list[Path]:
    """Files of a state folder that hold a text; what is only mounted there is not kept there."""
    disk = state.stat().st_dev
    files = [
        path
        for path in state.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_dev == disk
    ]
    return [path for path in files if value.encode() in path.read_bytes()]


def with_value(spec, value):
    return dataclasses.replace(spec, secrets=(("TOKEN", value),))


async def test_a_replica_that_serves_has_it_in_its_environment_and_in_a_file(shared, value):
    spec = shared.spec(app="serving", env={"FIRST": FIRST}, snapshot=False)
    report = await shared.start(with_value(spec, value))
    assert await shared.tell(report.replica, SEEN) == [value, value, value, ["0o600", "0o700"]]
    await shared.stop(report.replica)
    assert kept(shared.state, value) == []


async def test_a_snapshot_does_not_hold_it_and_each_clone_gets_its_own(shared, value):
    spec = shared.spec(app="without", env={"HOOKS": "1", "FIRST": FIRST})
    before = await shared.start(with_value(spec, value))  # has it, and is saved by nobody
    await shared.stop(before.replica)
    assert (await shared.capture(spec)).reason is None
    assert kept(shared.state, value) == []
    for given in (value, secrets.token_hex(24)):
        report = await shared.start(with_value(spec, given))
        assert report.kind is StartKind.RESTORED
        seen = await shared.tell(report.replica, SEEN)
        assert seen == [None, given, given, ["0o600", "0o700"]]
        await shared.stop(report.replica)
        assert kept(shared.state, given) == []


async def test_a_snapshot_of_an_app_that_allows_it_holds_it(shared, value):
    """So the search above finds what is there to be found."""
    rules = SnapshotRules(with_secrets=True)
    spec = shared.spec(app="allowing", env={"HOOKS": "1", "FIRST": FIRST}, rules=rules)
    assert (await shared.capture(with_value(spec, value))).reason is None
    holding = kept(shared.state / "snapshots", value) or kept(shared.state / "store", value)
    assert holding
    for path in holding:  # nobody else comes that far
        above = [folder for folder in path.parents if folder.is_relative_to(shared.state)]
        assert any(folder.stat().st_mode & 0o077 == 0 for folder in above if folder != shared.state)
    given = secrets.token_hex(24)
    report = await shared.start(with_value(spec, given))
    seen = await shared.tell(report.replica, SEEN)
    assert (report.kind, seen[:3]) == (StartKind.RESTORED, [value, given, given])
    await shared.stop(report.replica)


async def test_a_secret_that_is_no_file_name_is_refused(shared, value):
    for name in ("../TOKEN", "", "a/b"):
        spec = dataclasses.replace(shared.spec(), secrets=((name, value),))
        with pytest.raises(NodeError, match="is not a name of a secret"):
            await shared.start(spec)
    assert value not in repr(with_value(shared.spec(), value))


async def test_the_runtimes_file_with_the_environment_is_its_owners_alone(shared, value):
    report = await shared.start(with_value(shared.spec(snapshot=False), value))
    bundle = shared.state / "node/replicas" / report.replica / "bundle/config.json"
    assert value in bundle.read_text()
    assert bundle.stat().st_mode & 0o777 == 0o600
    await shared.stop(report.replica)
