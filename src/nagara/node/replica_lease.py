"""Puts a replica of this machine under its lease before anything is made for it."""

from collections.abc import Awaitable, Callable
from typing import Any

from nagara.contract.node import NodeError
from nagara.node.replica import Replica
from nagara.sandbox.keeper_client import KeeperClient, KeeperError


async def put_under_lease(
    keeper: KeeperClient, replica: Replica, stop: Callable[..., Awaitable[Any]]
) -> None:
    """From now on the keeper ends the replica when its lease is over.

    Replicas that older leases have left in the slot are ended first, by `stop`.

    Raises:
        NodeError: the lease is over, or its slot has been granted to another since.
    """
    lease = replica.record.lease
    try:
        displaced = await keeper.begin_lease(
            replica.name, lease.slot, lease.epoch, lease.expires_at_s
        )
    except KeeperError as error:
        raise NodeError(error.what, where=replica.name) from error
    for name in displaced:
        await stop(name, grace_s=0.0)
