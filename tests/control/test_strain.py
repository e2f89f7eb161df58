"""Replicas near what they may use: from readings to "one more beside it"."""

from dataclasses import replace

import pytest

from nagara.contract.replica import ReplicaUsage
from nagara.control.strain import FOR_S, STALE_S, STRAINED, Strain

EASY = ReplicaUsage("r", 0.0, 0.0, cores=2.0, memory_bytes=10, memory_limit_bytes=100)


def readings(strain: Strain, seconds: float, cpu: float = 0.1, **changes: object) -> float:
    """A reading each 5 s, with that share of the CPU; when the last one was."""
    at_s = 0.0
    while at_s <= seconds:
        usage = replace(EASY, at_s=at_s, cpu_s=cpu * EASY.cores * at_s, **changes)
        strain.take([usage], at_s)
        at_s += 5.0
    return at_s - 5.0


@pytest.mark.parametrize(
    ("resource", "changes"),
    [
        ("cpu", {"cpu": 0.9}),
        ("memory", {"memory_bytes": 81}),
        ("disk", {"disk_bytes": 81, "disk_limit_bytes": 100}),
        ("device", {"device": 0.95}),
    ],
)
def test_a_resource_above_80_percent_for_30_s_strains(resource: str, changes: dict) -> None:
    strain = Strain()
    assert strain.of("r", readings(strain, FOR_S - 5, **changes)) is None
    strain = Strain()
    # The first reading of the CPU says nothing: it takes two to have a share.
    assert strain.of("r", readings(strain, FOR_S + 5, **changes)) == resource
    assert strain.shares("r")[resource] > STRAINED


def test_exactly_80_percent_and_what_has_no_bound_do_not() -> None:
    strain = Strain()
    now_s = readings(strain, 100, memory_bytes=80, disk_bytes=1000, device=None)
    assert strain.of("r", now_s) is None


def test_one_reading_below_begins_the_time_anew() -> None:
    strain = Strain()
    now_s = readings(strain, 60, memory_bytes=90)
    assert strain.of("r", now_s) == "memory"
    strain.take([replace(EASY, at_s=now_s + 5)], now_s + 5)
    assert strain.of("r", now_s + 5) is None
    strain.take([replace(EASY, at_s=now_s + 10, memory_bytes=90)], now_s + 10)
    assert strain.of("r", now_s + 10 + FOR_S - 1) is None


def test_of_what_was_not_read_lately_nothing_is_known() -> None:
    strain = Strain()
    now_s = readings(strain, 60, memory_bytes=90)
    assert strain.of("r", now_s + STALE_S + 1) is None
    # And a gap is not taken for time that was above.
    strain.take([replace(EASY, at_s=now_s + 100, memory_bytes=90)], now_s + 100)
    assert strain.of("r", now_s + 100) is None
    strain.take([], now_s + 200)
    assert strain.shares("r") == {}


def test_a_machine_whose_clock_began_anew_is_no_negative_share() -> None:
    strain = Strain()
    now_s = readings(strain, 60, cpu=0.9)
    strain.take([replace(EASY, at_s=1.0, cpu_s=0.5)], now_s + 5)
    assert "cpu" not in strain.shares("r")
    strain.take([replace(EASY, at_s=6.0, cpu_s=0.4)], now_s + 10)
    assert strain.shares("r")["cpu"] == 0.0
