"""Questions to providers and machines: each has a limit of time, and fails in one way only.

Behind both are programs of other people and of other machines. One that hangs, or breaks in a way
nobody thought of, is one that did not answer: what it has done is unknown.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import TypeVar

from nagara.contract.machine import CheckKind, MachineUnreachableError, ProviderError
from nagara.pool.lease import RENEW_EVERY_S

PROVIDER_LIMIT_S = 150.0
MARK_LIMIT_S = RENEW_EVERY_S  # a reading of the clock, a renewal
FENCE_LIMIT_S = 10.0  # what is left of a replica is cleared away meanwhile
VITALS_LIMIT_S = 30.0
CHECK_LIMIT_S = {CheckKind.BOOT: 75.0, CheckKind.MEDIUM: 900.0, CheckKind.HEAVY: 5400.0}

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def of_provider(name: str, answer: Awaitable[_T]) -> _T:
    """The provider's answer.

    Raises:
        ProviderError: as the provider says, or it did not answer usefully.
    """
    return await _asked(name, answer, PROVIDER_LIMIT_S, ProviderError, "it broke")


async def of_machine(name: str, answer: Awaitable[_T], limit_s: float) -> _T:
    """The answer of a machine's agent.

    Raises:
        MachineUnreachableError: as the way to it says, or it did not answer usefully.
    """
    fault = "its answer is of no use"
    return await _asked(name, answer, limit_s, MachineUnreachableError, fault)


async def _asked(
    name: str,
    answer: Awaitable[_T],
    limit_s: float,
    told: type[ProviderError | MachineUnreachableError],
    fault: str,
) -> _T:
    """The answer, or an error of the kind `told`; `fault` says what any other error means."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except told:
        raise
    except TimeoutError as error:
        raise told(f"no answer within {limit_s:g} s", where=name) from error
    except Exception as error:  # foreign code: whatever is wrong with it, the loop goes on
        _log.exception("%s: %s", name, fault)
        raise told(f"{fault}: {error!r}", where=name) from error
