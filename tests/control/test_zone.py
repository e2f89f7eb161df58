"""Every machine is told of the caches there are; nobody sets them by hand."""

from nagara.control.zone import MOST_CACHES, OWN, TELL_AGAIN_S, Zone
from nagara.testing.clock import JumpingClock
from nagara.testing.fake_node import FakeNode


class Machines:
    """Some nodes, one of them this machine's."""

    def __init__(self, *names: str) -> None:
        self.clock = JumpingClock()
        self.nodes = {name: FakeNode(self.clock) for name in (OWN, *names)}
        self.zone = Zone(lambda: self.nodes, self.clock)

    async def told(self) -> dict[str, tuple[str, ...]]:
        await self.zone.tell_all()  # learns
        await self.zone.tell_all()  # and tells
        return {name: node.caches for name, node in self.nodes.items()}


async def test_every_machine_is_told_of_all_caches_but_its_own() -> None:
    machines = Machines("a", "b")
    assert await machines.told() == {OWN: (), "a": (), "b": ()}
    machines.nodes[OWN].cache, machines.nodes["b"].cache = "http://here", "http://b"
    await machines.clock.advance(TELL_AGAIN_S)
    found = await machines.told()
    assert found == {OWN: ("http://b",), "a": ("http://here", "http://b"), "b": ("http://here",)}


async def test_who_knows_is_left_alone_for_a_while_and_who_joins_is_told_at_once() -> None:
    machines = Machines("a")
    machines.nodes[OWN].cache = "http://here"
    await machines.told()
    before = machines.nodes["a"].told
    machines.nodes["b"] = FakeNode(machines.clock)
    assert (await machines.told())["b"] == ("http://here",)
    assert machines.nodes["a"].told == before
    machines.nodes["a"].caches = ()  # an agent that knows nothing, at the same address
    await machines.clock.advance(TELL_AGAIN_S)
    assert (await machines.told())["a"] == ("http://here",)


async def test_who_does_not_answer_is_told_later_and_who_has_left_is_forgotten() -> None:
    machines = Machines("a", "b")
    machines.nodes["a"].cache = "http://a"
    machines.nodes["b"].is_reachable = False
    assert (await machines.told())[OWN] == ("http://a",)
    assert not machines.zone.knows("b")
    machines.nodes["b"].is_reachable = True
    assert (await machines.told())["b"] == ("http://a",)
    del machines.nodes["a"]
    assert (await machines.told())["b"] == ()


async def test_nobody_is_told_of_more_caches_than_it_should_ask() -> None:
    names = "abcdef"
    machines = Machines(*names)
    for name in names:
        machines.nodes[name].cache = f"http://{name}"
    found = await machines.told()
    assert {len(caches) for caches in found.values()} <= {MOST_CACHES, MOST_CACHES - 1}
    assert found[OWN] == ("http://a", "http://b", "http://c")
