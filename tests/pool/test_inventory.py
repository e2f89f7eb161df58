import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from nagara.contract.machine import NO_RESOURCES, Resources
from nagara.pool.actions import Granted, NoSlot
from nagara.pool.demandclass import ANY, DemandClass
from nagara.pool.fairness import Claimant
from nagara.pool.inventory import Inventory
from nagara.pool.simulate.throughput import big_pool
from nagara.testing.pools import a_core, an_offering, make_ready

classes = st.builds(
    DemandClass,
    st.one_of(st.none(), st.frozensets(st.sampled_from("tuv"), min_size=1)),
    st.sampled_from([(), ("r",), ("s*",)]),
    st.integers(1, 4),
)
kinds = st.tuples(st.sampled_from("tuv"), st.sampled_from(["r", "s1"]), st.integers(1, 4))


@settings(deadline=None, max_examples=60)
@given(st.lists(kinds, max_size=6), st.lists(st.tuples(classes, st.booleans()), max_size=30))
def test_a_claim_finds_a_slot_exactly_when_there_is_one(
    machines: list[tuple[str, str, int]], claims: list[tuple[DemandClass, bool]]
) -> None:
    core, leases = a_core(), []
    for number, (type_, region, devices) in enumerate(machines):
        kind = an_offering(
            f"o{number % 4}-{type_}{region}{devices}", type=type_, region=region, devices=devices,
            price_h=float(7 * (number % 4) % 5 + 1),  # an offering has one price
        )  # fmt: skip
        make_ready(core, kind)
    for wanted, is_given_back in claims:
        fitting = [
            machine
            for machine in core.table
            if wanted.accepts(machine.offering) and len(machine.free) >= wanted.devices
        ]
        assert core.grants.inventory.free_for(wanted) == sum(
            len(machine.free) // wanted.devices for machine in fitting
        )
        granted = core.claim(Claimant("app"), wanted, 0.0)
        assert isinstance(granted, Granted) == bool(fitting)
        if isinstance(granted, Granted):
            price = min(one.offering.price_h / one.offering.devices for one in fitting)
            chosen = core.table.named(granted.machine).offering
            assert chosen.price_h / chosen.devices == price
            leases.append(granted.lease)
        if is_given_back and leases:
            core.give_back(leases.pop(0), 0.0, is_confirmed=True)


@pytest.mark.parametrize("is_last_empty", [True, False])
def test_the_last_machine_with_room_is_found_among_many_without(is_last_empty: bool) -> None:
    core = a_core()
    kind = an_offering(devices=3, resources=Resources(100, 100, 100))
    most = Resources(memory_bytes=80)
    for number in range(40):
        make_ready(core, kind)
        if number < 39 or not is_last_empty:
            needs = most if number < 39 else Resources(memory_bytes=1)
            assert isinstance(core.claim(Claimant("full"), ANY, 0.0, needs), Granted)
    assert isinstance(core.claim(Claimant("app"), ANY, 0.0, Resources(memory_bytes=30)), Granted)
    both = DemandClass(devices=2)
    found = core.claim(Claimant("app"), both, 0.0, Resources(memory_bytes=30))
    assert isinstance(found, Granted)
    full = core.claim(Claimant("app"), ANY, 0.0, Resources(memory_bytes=50))
    assert isinstance(full, NoSlot)


def test_an_empty_inventory_finds_nothing() -> None:
    inventory = Inventory()
    assert inventory.find(DemandClass(devices=9), NO_RESOURCES) is None
    assert inventory.free_for(DemandClass()) == 0


def test_a_large_pool_is_emptied_to_its_last_slot() -> None:
    core = big_pool(50, offerings=20, devices=4)
    granted = [core.claim(Claimant("app"), DemandClass(), 0.0) for _ in range(201)]
    slots = {one.lease.slot for one in granted if isinstance(one, Granted)}
    assert len(slots) == 200
