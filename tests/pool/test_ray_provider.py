"""Machines of a cluster as offerings: what is there, what is lent, what is waited for."""

from dataclasses import replace
from pathlib import Path

import pytest

from nagara.contract.cluster import MachineKind
from nagara.contract.machine import NoCapacityError, Presence, ProviderError, Resources
from nagara.pool.errors import PoolFileError
from nagara.pool.poolfile import open_providers, ray_tables, ray_terms, read_pool_file
from nagara.pool.providers.ray import PATIENCE_S, AddedKind, RayProvider, RayTerms
from nagara.testing.clock import JumpingClock
from nagara.testing.fake_engine import FakeEngine, a_machine
from nagara.testing.provider_conformance import ProviderConformance

H100 = MachineKind("h100", 8, 96.0)


class TestRayProvider(ProviderConformance):
    @pytest.fixture
    def provider(self) -> RayProvider:
        return RayProvider("ray", FakeEngine(a_machine("m1"), a_machine("m2")))


class TestRayProviderWithAutoscaler(ProviderConformance):
    @pytest.fixture
    def provider(self) -> RayProvider:
        return RayProvider("ray", FakeEngine(), RayTerms(adds=(AddedKind(H100, most=2),)))


async def test_machines_of_a_kind_are_one_offering_with_those_nobody_uses_in_stock() -> None:
    engine = FakeEngine(
        *(a_machine(f"m{number}") for number in range(3)),
        a_machine("g1", type_="h100", devices=8),
        replace(a_machine("m4"), problem="Ray's actor there does not answer"),
        replace(a_machine("m5"), region="eu-1"),
        replace(a_machine("m6"), memory_bytes=16 << 30, lent_as="pool-0"),
    )
    provider = RayProvider("ray", engine, RayTerms(slots=4, price_h={"h100": 20.0}))
    found = {one.id: one for one in await provider.offerings()}
    assert {key: one.stock for key, one in found.items()} == {
        "ray/cpu-8c": 3, "ray/h100x8-8c": 1, "ray/cpu-8c-eu-1": 1,
    }  # fmt: skip
    cpu, gpu = found["ray/cpu-8c"], found["ray/h100x8-8c"]
    assert (cpu.type, cpu.devices, cpu.price_h) == ("cpu", 4, 0.0)
    assert (gpu.type, gpu.devices, gpu.price_h) == ("h100", 8, 20.0)
    assert cpu.resources == Resources(8.0, 16 << 30, 100 << 30), "not what the least of them has"
    await provider.launch("pool-1", cpu)
    assert {one.stock for one in await provider.offerings() if one.id == cpu.id} == {2}


async def test_a_machine_whose_agent_does_not_run_yet_is_pending() -> None:
    engine = FakeEngine(replace(a_machine("m1"), lent_as="pool-1"))
    provider = RayProvider("ray", engine)
    (machine,) = await provider.machines()
    assert (machine.name, machine.presence, machine.address) == ("pool-1", Presence.PENDING, "")
    engine.present["m1"] = replace(engine.present["m1"], address="tcp://m1:9300")
    (machine,) = await provider.machines()
    assert (machine.presence, machine.address) == (Presence.RUNNING, "tcp://m1:9300")


async def test_where_others_were_quicker_the_next_one_is_lent() -> None:
    engine = FakeEngine(a_machine("m1"), a_machine("m2"))
    provider = RayProvider("ray", engine)
    (offering,) = await provider.offerings()
    engine.busy = {"m1"}
    await provider.launch("pool-1", offering)
    assert engine.present["m2"].lent_as == "pool-1"
    with pytest.raises(NoCapacityError):
        await provider.launch("pool-2", offering)


async def test_the_autoscaler_is_asked_and_what_comes_is_lent_to_who_waits() -> None:
    engine = FakeEngine()
    provider = RayProvider("ray", engine, RayTerms(adds=(AddedKind(H100, most=2),)))
    (offering,) = await provider.offerings()
    assert offering.stock == 2
    await provider.launch("pool-1", offering)
    await provider.launch("pool-2", offering)
    assert engine.asked == (H100, H100)
    with pytest.raises(NoCapacityError):
        await provider.launch("pool-3", offering)
    engine.present["g1"] = replace(a_machine("g1", type_="h100", devices=8), cpu=96.0)
    machines = {one.name: one for one in await provider.machines()}
    assert machines["pool-1"].presence is Presence.RUNNING
    assert machines["pool-2"].presence is Presence.PENDING
    assert engine.asked == (H100,)
    await provider.release("pool-2")
    assert engine.asked == ()
    assert [one.name for one in await provider.machines()] == ["pool-1"]


async def test_a_machine_that_comes_is_lent_whatever_its_region_is_called() -> None:
    engine = FakeEngine()
    provider = RayProvider("ray", engine, RayTerms(adds=(AddedKind(H100),)))
    (offering,) = await provider.offerings()
    await provider.launch("pool-1", offering)
    engine.present["g1"] = replace(
        a_machine("g1", type_="h100", devices=8), cpu=96.0, region="eu-1"
    )
    assert [one.presence for one in await provider.machines()] == [Presence.RUNNING]
    assert engine.asked == ()


async def test_what_does_not_come_is_refused_and_no_longer_asked_for() -> None:
    clock, engine = JumpingClock(), FakeEngine()
    provider = RayProvider("ray", engine, RayTerms(adds=(AddedKind(H100, most=2),)), clock)
    (offering,) = await provider.offerings()
    await provider.launch("pool-1", offering)
    engine.obstacle = "max_workers"
    await provider.launch("pool-2", offering)
    await clock.advance(PATIENCE_S - 1)
    assert {one.presence for one in await provider.machines()} == {Presence.PENDING}
    engine.obstacle = ""  # it had not looked yet
    assert {one.presence for one in await provider.machines()} == {Presence.PENDING}
    engine.obstacle = "max_workers"
    await provider.machines()
    await clock.advance(PATIENCE_S)
    first, second = await provider.machines()
    assert (first.name, first.presence) == ("pool-1", Presence.PENDING)
    assert (second.presence, second.problem) == (Presence.REFUSED, "max_workers")
    assert engine.asked == (H100,)
    await provider.release("pool-2")
    assert [one.name for one in await provider.machines()] == ["pool-1"]


async def test_what_is_added_has_a_price_for_else_it_would_be_kept_for_ever() -> None:
    engine = FakeEngine(a_machine("m1"), a_machine("g1", type_="h100", devices=8))
    engine.present["g1"] = replace(engine.present["g1"], cpu=96.0, region="eu-1")
    adds = (AddedKind(H100),)
    found = await RayProvider("ray", engine, RayTerms(adds=adds)).offerings()
    assert {one.id: one.price_h > 0 for one in found} == {
        "ray/cpu-8c": False, "ray/h100x8-96c": True, "ray/h100x8-96c-eu-1": True,
    }  # fmt: skip
    (_, gpu, _) = await RayProvider("ray", engine, RayTerms(None, {"h100": 0.0}, adds)).offerings()
    assert gpu.price_h == 0.0


async def test_what_an_earlier_process_asked_for_is_taken_back_once() -> None:
    engine = FakeEngine()
    engine.asked = (H100,)
    await RayProvider("ray", engine).machines()
    assert engine.asked == (H100,), "others than it may ask, too"
    provider = RayProvider("ray", engine, RayTerms(adds=(AddedKind(H100),)))
    await provider.machines()
    assert engine.asked == ()
    engine.asked = (H100,)
    await provider.machines()
    assert engine.asked == (H100,), "of another job"


async def test_an_engine_that_is_away_is_an_unknown_outcome_and_no_empty_list() -> None:
    engine = FakeEngine(a_machine("m1"))
    provider = RayProvider("ray", engine, RayTerms(adds=(AddedKind(H100),)))
    (first, _) = await provider.offerings()
    engine.is_reachable = False
    for question in (provider.machines(), provider.offerings(), provider.launch("n", first)):
        with pytest.raises(ProviderError, match="out of reach"):
            await question


FILE = """
[provider.cluster]
kind = "ray"
address = "auto"
slots = 4
port = 9300
price_h = {h100 = 2.5}
adds = [{type = "h100", devices = 8, cpu = 96, memory_gib = 512, most = 4}]
"""


def test_the_file_names_a_cluster_and_what_may_be_added(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(FILE)
    file = read_pool_file(tmp_path / "pool.toml")
    (table,) = ray_tables(file)
    kind = MachineKind("h100", 8, 96.0, 512 << 30)
    assert ray_terms(table) == RayTerms(4, {"h100": 2.5}, (AddedKind(kind, 4),))
    (provider,) = open_providers(file, lambda _: FakeEngine())
    assert provider.name == "cluster"
    with pytest.raises(PoolFileError, match="known only while it is in use"):
        open_providers(file)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("address = 1", "address must be a text"),
        ("slots = 0", "slots must be a whole number from 1"),
        ("port = true", "port must be a whole number"),
        ("price_h = 2", "price_h must be a table"),
        ("price_h = {h100 = -1}", "price_h must be a table"),
        ("adds = 1", "adds must be a list"),
        ("adds = [1]", "adds is no table"),
        ("adds = [{type = 'h100'}]", "each needs a type and how many cpu"),
        ("adds = [{type = 'h100', cpu = 1, most = 0}]", "most must be a whole number from 1"),
        ("adds = [{type = 'h100', cpu = 1, memory_gib = 'x'}]", "memory_gib must be a number"),
        ("adds = [{type = 'h100', cpu = 1, x = 0}]", "adds.x is not a key"),
        ("nodes = 3", "nodes is not a key"),
    ],
)
def test_what_a_cluster_cannot_be_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(f'[provider.cluster]\nkind = "ray"\n{line}\n')
    with pytest.raises(PoolFileError, match=said):
        read_pool_file(file)
