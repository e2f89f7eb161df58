"""What every way to an agent must do when control processes follow each other, as tests.

Inherit from `EpochConformance` in a test module and provide a fixture `offer`: an asynchronous
function that offers a node, and gives back what makes the node at the far end for a mandate.

    class TestMyWay(EpochConformance):
        @pytest.fixture
        async def offer(self): ...
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError, Node, NodeUnavailableError
from nagara.contract.replica import Canary, Lease, ReplicaSpec, StartOrder, StartReport
from nagara.node.mandate import Mandate
from nagara.testing.agent_conformance import BareNode, read_all, read_some, send_all

AsWho = Callable[[Mandate], Node]
Offer = Callable[[Node], Awaitable[AsWho]]

_LIMIT_S = 60.0


class Writing(BareNode):
    """A node that writes down which orders it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[str] = []
        self.is_starting = asyncio.Event()

    async def start(self, order: StartOrder) -> StartReport:
        self.is_starting.set()
        return await super().start(order)

    async def stop(self, replica: str, *, grace_s: float = 10.0) -> None:
        self.orders.append(replica)
        await asyncio.sleep(0)
        await super().stop(replica, grace_s=grace_s)


class Holder(Mandate):
    """A control process; `refusals` is what it was told of."""

    def __init__(self, number: int, database: str = "one") -> None:
        super().__init__()
        self.refusals: list[DeposedError] = []
        self.epoch = lambda: ControlEpoch(database, number)
        self.on_refused = self.refusals.append


class EpochConformance:
    """The tests."""

    @pytest.fixture
    async def node(self) -> AsyncIterator[Writing]:
        node = Writing()
        yield node
        await node.close()

    async def test_whoever_was_deposed_is_refused_everything_and_told(
        self, node: Writing, offer: Offer
    ) -> None:
        far, deposed = await offer(node), Holder(1)
        old, new = far(deposed), far(Holder(2))
        await old.stop("a")
        await new.facts()
        for call in (old.stop("b"), old.replicas(), old.dial("bare"), anext(aiter(old.exits()))):
            with pytest.raises(DeposedError, match="epoch is 2, this one's 1") as caught:
                await call
            assert caught.value.where
            assert caught.value.hint
        assert len(deposed.refusals) == 4
        await new.stop("c")
        assert node.orders == ["a", "c"]

    async def test_a_start_under_way_ends_with_its_control(
        self, node: Writing, offer: Offer
    ) -> None:
        far = await offer(node)
        old, new = far(Holder(1)), far(Holder(2))
        node.scripts["app"].plain_s = 600.0
        starting = asyncio.create_task(old.start(_order("app-1")))
        listening = asyncio.ensure_future(anext(aiter(old.exits())))
        async with asyncio.timeout(_LIMIT_S):
            await node.is_starting.wait()
            while not node._listeners:  # noqa: ASYNC110 - the node tells nobody
                await asyncio.sleep(0.01)
            await new.replicas()
            with pytest.raises(NodeUnavailableError):
                await starting
            with pytest.raises(NodeUnavailableError):
                await listening
            while node.cancelled != ["app-1"]:  # noqa: ASYNC110 - the node tells nobody
                await asyncio.sleep(0.01)
        assert await new.replicas() == ()

    async def test_what_was_dialled_goes_on(self, node: Writing, offer: Offer) -> None:
        """A request that a deposed gateway has in hand is no order: its client gets its answer."""
        far = await offer(node)
        async with asyncio.timeout(_LIMIT_S):
            caller = await far(Holder(1)).dial("bare")
            replica, _ = await asyncio.get_running_loop().sock_accept(node.server)
        replica.setblocking(False)
        with caller, replica:
            await far(Holder(2)).facts()
            await send_all(caller, b"question")
            assert await read_all(replica) == b"question"
            await asyncio.get_running_loop().sock_sendall(replica, b"answer")
            assert await read_some(caller) == b"answer"

    async def test_no_order_of_the_older_follows_one_of_the_newer(
        self, node: Writing, offer: Offer
    ) -> None:
        far = await offer(node)
        old, new = far(Holder(1)), far(Holder(2))

        async def give(far_end: Node, word: str, count: int) -> None:
            for _ in range(count):
                await far_end.stop(word)

        async with asyncio.timeout(_LIMIT_S):
            giving = [asyncio.create_task(give(old, "old", 1000)) for _ in range(8)]
            while len(node.orders) < 40:  # noqa: ASYNC110 - the node tells nobody
                await asyncio.sleep(0)
            await asyncio.gather(*(give(new, "new", 5) for _ in range(8)))
            ends = await asyncio.gather(*giving, return_exceptions=True)
        assert {type(end) for end in ends} <= {DeposedError, NodeUnavailableError}
        assert "old" not in node.orders[node.orders.index("new") :]
        assert node.orders.count("new") == 40

    async def test_numbers_of_another_database_are_not_compared(
        self, node: Writing, offer: Offer
    ) -> None:
        far = await offer(node)
        one, other = far(Holder(1000)), far(Holder(1, "two"))
        for who, word in ((one, "a"), (other, "b"), (one, "c")):
            await who.stop(word)
        assert node.orders == ["a", "b", "c"]

    async def test_who_is_no_control_process_may_look(self, node: Writing, offer: Offer) -> None:
        far, told = await offer(node), Holder(0)
        told.epoch = lambda: None
        nobody = far(told)
        await nobody.stop("a")  # of a nagara that knows no epochs
        await far(Holder(1)).facts()
        assert await nobody.replicas() == ()
        with pytest.raises(DeposedError, match="with an epoch only"):
            await nobody.stop("b")
        assert node.orders == ["a"]

    async def test_a_call_without_a_right_is_not_made(self, node: Writing, offer: Offer) -> None:
        def refuse() -> None:
            raise NodeUnavailableError("the lease was not renewed")

        holder = Holder(1)
        holder.epoch = refuse
        with pytest.raises(NodeUnavailableError, match="not renewed"):
            await (await offer(node))(holder).stop("a")
        assert node.orders == []


def _order(replica: str) -> StartOrder:
    spec = ReplicaSpec(
        tenant="default", app="app", definition="d", image="host", command=("serve",), port=8000,
        ready_path="/", canary=Canary("/"),
    )  # fmt: skip
    return StartOrder(replica, Lease("m/0", 1), spec)
