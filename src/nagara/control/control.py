"""The control process: gateway, autoscaler, state and API, put together.

One loop, one web server, one `TaskGroup` that owns everything. It needs no privileges: whatever
needs them is behind the `Node` it is given.
"""

import asyncio
import errno
import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from nagara.base.clock import Clock, SystemClock
from nagara.base.durable import write_durably
from nagara.base.errors import NagaraError, UsageError
from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError, Node, NodeUnavailableError
from nagara.contract.replica import ModelMount
from nagara.control.api import Api
from nagara.control.app import App
from nagara.control.app_images import with_images
from nagara.control.app_secrets import AppSecrets
from nagara.control.appfile import parse_apps
from nagara.control.auth import KEY_FILE, Auth
from nagara.control.callback_hosts import CallbackHosts
from nagara.control.callbacks import Callbacks
from nagara.control.client import CONTROL_FILE
from nagara.control.database import database_for
from nagara.control.deployments import Deployments
from nagara.control.errors import ControlError, StateLostError
from nagara.control.figures_api import Figures
from nagara.control.fleet import Fleet
from nagara.control.gateway import Gateway
from nagara.control.history import History
from nagara.control.job_record import JobRecord
from nagara.control.jobs import Jobs
from nagara.control.lending import Lending
from nagara.control.live import Live
from nagara.control.machines import Machines, Nodes
from nagara.control.nodewatch import NodeWatch
from nagara.control.pool_record import PoolRecord
from nagara.control.refusal import Refusal
from nagara.control.retention import Retention
from nagara.control.scaling import Scaling
from nagara.control.sql import Database
from nagara.control.state import State
from nagara.control.tasks import Tasks
from nagara.control.telemetry import Telemetry
from nagara.control.watch_api import WatchApi
from nagara.control.web_page import WebPage
from nagara.control.web_server import LimitedServer
from nagara.pool.bootclock import BootClock
from nagara.pool.service import PoolService
from nagara.pool.setup import PoolSetup

DRAIN_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a control process tells when it serves."""

    url: str
    api_key: str | None  # the first key, if its file is still there


def no_models(name: str) -> ModelMount:
    """For a machine without models."""
    raise UsageError(f"there is no model {name!r} on this machine")


def no_other_nodes(address: str) -> Node:
    """For a pool of this machine alone."""
    raise AssertionError(f"nobody launches machines here, but there is one at {address!r}")


class Control:
    """One control process over one node, and the machines of its pool.

    Args:
        state_dir: its folder, used by no other control process at the same time.
        node: the machine it runs on.
        pool: the machines that replicas run on, this one among them.
        nodes: reaches the node of another machine by its address.
        host: where to listen; loopback unless other machines shall reach it.
        port: 0 takes a free one.
        models: finds a model of the machine by name; must be quick; raises `NagaraError`.
        auth: "keys", or "off" to let anybody who reaches the address call the apps.
        drain_s: how long running requests may go on when it stops.
        otlp: address of an OpenTelemetry collector that traces are sent to.
        database: address of a PostgreSQL database; by default the state is a file in its folder.
        callback_hosts: who may be called back, by name or pattern; see `callback_hosts`.

    Attributes:
        database: the state's, while it runs.
    """

    database: Database

    def __init__(
        self,
        state_dir: Path,
        node: Node,
        pool: PoolSetup,
        *,
        nodes: Nodes = no_other_nodes,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Callable[[str], ModelMount] = no_models,
        auth: str = "keys",
        clock: Clock | None = None,
        drain_s: float = DRAIN_S,
        otlp: str | None = None,
        database: str | None = None,
        callback_hosts: Sequence[str] = (),
    ) -> None:
        if auth not in ("keys", "off"):
            raise UsageError(f"auth must be 'keys' or 'off', not {auth!r}")
        self._clock = clock or SystemClock()
        self._state_dir = state_dir
        self._node = node
        self._pool_setup = pool
        self._nodes = nodes
        self._pool_clock = clock or BootClock()
        self._host = host
        self._port = port
        self._models = models
        self._is_open = auth == "off"
        self._drain_s = drain_s
        self._database_url = database
        self._callback_hosts = CallbackHosts(callback_hosts)
        self._epoch: ControlEpoch | None = None
        self._is_lost = False
        self._telemetry = Telemetry(self._clock, otlp)
        self._stopping = asyncio.Event()
        self._keep = False

    def epoch(self) -> ControlEpoch | None:
        """What every call to a machine has to carry; None until the state is open.

        Raises:
            NodeUnavailableError: another process may have the state by now.
        """
        if self._epoch is not None and not self.database.is_held():
            raise NodeUnavailableError("nothing is asked of it: the state's lease was not renewed")
        return self._epoch

    def deposed(self, refusal: DeposedError) -> None:
        """A machine takes orders from another control process: this one ends."""
        if not self._is_lost:
            _log.error("%s", refusal)
            self._lost()

    def stop(self, *, keep: bool = False) -> None:
        """Asks for a graceful end. `keep` leaves the ready replicas to the next process."""
        self._keep = keep
        self._stopping.set()

    async def run(
        self, ready: Callable[[Ready], None], *, app_file: tuple[str, str] | None = None
    ) -> None:
        """Serves until `stop` is called or the task is cancelled.

        Args:
            ready: called once, when requests are accepted.
            app_file: (text, name) of an app file to deploy before that.

        Raises:
            StateBusyError: another control process uses the folder.
            UsageError: the app file is wrong.
        """
        apps = parse_apps(*app_file) if app_file is not None else ()
        self.database = database = database_for(self._state_dir, self._database_url)
        database.on_lost = self._lost
        try:
            if await self._is_opened(database):
                self._epoch = database.epoch
                await self._run_opened(database, apps, ready)
        finally:
            await database.close()
        if self._is_lost:
            raise StateLostError(
                "another control process has taken the state over; this one has ended",
                hint="nothing, if that was meant: it serves now, with the same replicas",
            )

    async def _run_opened(
        self, database: Database, apps: Sequence[App], ready: Callable[[Ready], None]
    ) -> None:
        state = State(database, self._clock)
        auth = Auth(self._state_dir, state, self._clock, is_open=self._is_open)
        await auth.load()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = Tasks(group)
                tasks.spawn(Retention(database, self._clock).run, "retention")
                pool = await self._pool(database)
                node = self._machines(pool)
                tasks.spawn(node.zone.run, "zone caches")
                fleet = Fleet(
                    *(node, Lending(pool), state, self._models, self._clock, tasks),
                    self._telemetry,
                    scopes=node,
                )
                pool.on_lost, pool.on_room = fleet.lost, fleet.hand_on
                deployments = Deployments(fleet, node, state, self._clock)
                await deployments.begin()
                named = [(app, fleet.mounts(app)) for app in apps]
                for app in await with_images(self._node, named):
                    await deployments.deploy(app)
                jobs = self._jobs(database, fleet, tasks)
                history = History(database)
                live = Live(fleet.services, self._telemetry, pool, history, self._clock)
                await self._serve(
                    *(group, deployments, fleet, node, pool, state, live, auth, jobs, ready)
                )
        except BaseExceptionGroup as errors:
            if self._is_lost and errors.split(ControlError)[1] is None:
                return  # that nothing can be written is no news then
            # A fault that a person can act upon comes as itself, not as a group of one.
            only = errors.exceptions[0]
            if len(errors.exceptions) == 1 and isinstance(only, NagaraError):
                raise only from None
            raise

    async def _is_opened(self, database: Database) -> bool:
        """Opens the state, which may take until its writer is gone; False if asked to stop."""
        opening = asyncio.ensure_future(database.open())
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                await opening
            return opening.done()
        finally:
            opening.cancel()
            stopping.cancel()
            await asyncio.gather(opening, stopping, return_exceptions=True)

    def _lost(self) -> None:
        """Another process is the writer: it has the replicas now, and this one must go."""
        _log.error("the state is another control process's now; ending and leaving the replicas")
        self._is_lost = True
        self._drain_s = 0.0
        self.stop(keep=True)

    def _jobs(self, database: Database, fleet: Fleet, tasks: Tasks) -> Jobs:
        record = JobRecord(database, self._clock)
        callbacks = Callbacks(record, self._callback_hosts, self._clock, tasks)
        return Jobs(record, fleet.services, fleet.broken, self._clock, tasks, callbacks)

    def _machines(self, pool: PoolService) -> Machines:
        values = AppSecrets(self._state_dir).values
        return Machines(self._node, pool, self._nodes, values, self._clock)

    async def _pool(self, database: Database) -> PoolService:
        record = PoolRecord(database)
        saved = await record.read()
        pool = PoolService(saved, record, self._pool_setup, self._pool_clock, _machine_name)
        await pool.load()
        return pool

    async def _serve(
        self,
        group: asyncio.TaskGroup,
        deployments: Deployments,
        fleet: Fleet,
        node: Machines,
        pool: PoolService,
        state: State,
        live: Live,
        auth: Auth,
        jobs: Jobs,
        ready: Callable[[Ready], None],
    ) -> None:
        watch = NodeWatch(node, fleet, state, self._clock)
        await watch.take_over()
        pool.settle()
        pooling = group.create_task(pool.run(), name="pool")
        loops = [
            group.create_task(watch.listen(), name="listen to the node"),
            group.create_task(watch.compare_for_ever(), name="compare with the node"),
            group.create_task(watch.measure_for_ever(), name="what replicas use"),
            group.create_task(
                Scaling(fleet, self._clock, self._telemetry.metrics.decision_s).run(),
                name="scaling",
            ),
            group.create_task(live.run(), name="watching"),
        ]
        tracing = group.create_task(self._telemetry.tracer.run(), name="traces")
        gateway = Gateway(*(fleet.services, auth, fleet.broken, self._clock, self._telemetry, jobs))
        await jobs.begin()
        figures = Figures(self._telemetry, fleet.services, pool, node)
        api = Api(deployments, fleet, node, state, auth, pool, figures, WatchApi(live, node))
        runner = _server(gateway, api, WebPage())
        await runner.setup()
        try:
            url = await self._listen(runner)
            self._announce(url)
            key_file = self._state_dir / KEY_FILE
            key = key_file.read_text().strip() if key_file.exists() else None
            _log.debug("serving at %s", url)
            ready(Ready(url, key))
            await self._stopping.wait()
        finally:
            gateway.is_ready = False
            live.close()
            await self._end(fleet, runner, loops)
            pooling.cancel()
            tracing.cancel()
            await asyncio.wait([pooling, tracing])
            await pool.close()

    async def _listen(self, runner: web.ServerRunner) -> str:
        site = web.TCPSite(runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            raise ControlError(
                f"cannot listen: {error.strerror or error}", where=f"{self._host}:{self._port}",
                hint="choose another port" if error.errno == errno.EADDRINUSE else None,
            ) from error  # fmt: skip
        host, port = runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _announce(self, url: str) -> None:
        document = json.dumps({"url": url, "pid": os.getpid()})
        write_durably(self._state_dir / CONTROL_FILE, document.encode())

    async def _end(
        self, fleet: Fleet, runner: web.ServerRunner, loops: list[asyncio.Task[None]]
    ) -> None:
        """No new connections; held requests are refused; running ones may end; then the rest."""
        with suppress(FileNotFoundError):
            (self._state_dir / CONTROL_FILE).unlink()
        for loop in loops:
            loop.cancel()
        for site in list(runner.sites):
            await site.stop()
        for service in fleet.services.values():
            service.dispatcher.close(
                Refusal(503, "nagara is being stopped", code="stopping", retry_after_s=5.0)
            )
        await fleet.end(keep=self._keep, drain_s=self._drain_s)
        await runner.cleanup()


def _machine_name(pool: str) -> str:
    return f"{pool}-{secrets.token_hex(4)}"


def _server(gateway: Gateway, api: Api, page: WebPage) -> web.ServerRunner:
    """The web server: the API below `/api/`, the page at `/`, apps everywhere else.

    Without aiohttp's own router: an app's host name decides before any path does.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        is_api = request.raw_path.startswith("/api/") or request.raw_path == "/metrics"
        is_page = page.serves(request.raw_path)
        if (is_api or is_page) and gateway.app_of_host(request) is None:
            return await api.handle(request) if is_api else page.handle(request)
        return await gateway.handle(request)

    return web.ServerRunner(LimitedServer(handle), shutdown_timeout=1.0)
