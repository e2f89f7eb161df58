"""How two ends of a connection find out that both know the cluster's token.

    caller                              agent
       ──▶  NAGARA01  caller's number
       ◀──  NAGARA01  agent's number  proof("agent", both numbers)
       ──▶  proof("control", both numbers)      and its first request at once

The numbers are new for each connection, so what was overheard proves nothing later; the roles
differ, so an end that only repeats what it hears proves nothing either. The caller says nothing
of what it wants before the agent has proven itself. The agent just leaves a caller that does not.
"""

import secrets

from nagara.base.errors import NagaraError
from nagara.node.network.channel import Channel
from nagara.node.network.cluster_token import PROOF_BYTES, ClusterToken

_BEGIN = b"NAGARA01"
_NUMBER_BYTES = 32


class HelloError(NagaraError):
    """The other end is no member of this cluster, or speaks something else."""


async def greet(channel: Channel, token: ClusterToken) -> None:
    """The caller's part. Raises `HelloError`, and OSError when the connection breaks."""
    own = secrets.token_bytes(_NUMBER_BYTES)
    await channel.write(_BEGIN + own)
    said = await channel.read_exactly(len(_BEGIN) + _NUMBER_BYTES + PROOF_BYTES)
    if not said:
        raise HelloError(
            "it closed the connection at once",
            hint="if it has --certificates, this side must have them too, and the reverse",
        )
    if len(said) < len(_BEGIN) + _NUMBER_BYTES + PROOF_BYTES or not said.startswith(_BEGIN):
        raise HelloError("it is no agent of this version of nagara, or does not speak plainly")
    number, proof = said[len(_BEGIN) : -PROOF_BYTES], said[-PROOF_BYTES:]
    if not token.is_proof(proof, "agent", own, number):
        raise HelloError(
            "it does not have this cluster's token",
            hint="give the same --token-file to it and to this side",
        )
    await channel.write(token.proof("control", own, number))


async def meet(channel: Channel, token: ClusterToken) -> None:
    """The agent's part. Raises `HelloError` if the caller has not proven itself."""
    said = await channel.read_exactly(len(_BEGIN) + _NUMBER_BYTES)
    if len(said) < len(_BEGIN) + _NUMBER_BYTES or not said.startswith(_BEGIN):
        raise HelloError("it does not begin as control processes of this version of nagara do")
    number, own = said[len(_BEGIN) :], secrets.token_bytes(_NUMBER_BYTES)
    await channel.write(_BEGIN + own + token.proof("agent", number, own))
    proof = await channel.read_exactly(PROOF_BYTES)
    if not token.is_proof(proof, "control", number, own):
        raise HelloError("it does not have this cluster's token")
