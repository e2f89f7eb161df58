"""The fake node is a node."""

from collections.abc import AsyncIterator

import pytest

from nagara.contract.replica import ReplicaSpec
from nagara.testing.fake_node import FakeNode
from nagara.testing.node_conformance import NodeConformance


def _fails(spec: ReplicaSpec) -> str | None:
    return "boom: no weights" if spec.app == "failing" else None


class TestFakeNode(NodeConformance):
    @pytest.fixture
    async def node(self) -> AsyncIterator[FakeNode]:
        node = FakeNode(fails=_fails)
        node.scripts["slow"].plain_s = 30
        node.scripts["steady"].can_snapshot = True
        yield node
        await node.close()
