"""Waits until replicas without a route have answered their last requests. Called on the loop."""

import asyncio
import logging

from nagara.control.dispatch import Endpoint

_log = logging.getLogger(__name__)


class Draining:
    """The endpoints that are waited for."""

    def __init__(self) -> None:
        self._endpoints: dict[str, Endpoint] = {}
        self._is_over = False

    async def wait(self, endpoint: Endpoint, limit_s: float) -> None:
        """Returns after the endpoint's last request, when it is cut, or after `limit_s`."""
        self._endpoints[endpoint.replica] = endpoint
        if self._is_over:
            endpoint.cut()
        try:
            async with asyncio.timeout(limit_s):
                await endpoint.drained()
        except TimeoutError:
            _log.warning(
                "%s: %d requests still run after %g s of draining; cutting them off",
                endpoint.replica, endpoint.running, limit_s,
            )  # fmt: skip
        finally:
            del self._endpoints[endpoint.replica]

    def cut(self, replica: str) -> None:
        """Whatever runs there is not waited for any longer."""
        endpoint = self._endpoints.get(replica)
        if endpoint is not None:
            endpoint.cut()

    def cut_all(self) -> None:
        """Nothing is waited for any longer, now or later."""
        self._is_over = True
        for endpoint in self._endpoints.values():
            endpoint.cut()
