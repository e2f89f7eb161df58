"""A control process over a fake node, in a thread of its own, and Chromium to look at its page."""

import asyncio
import contextlib
import http.client
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nagara.base.clock import SystemClock
from nagara.base.spans import STAGES, with_unaccounted
from nagara.contract.machine import CheckKind, HealthReport
from nagara.control.appfile import parse_apps
from nagara.control.client import ControlClient, connect
from nagara.control.control import Control, Ready
from nagara.control.database import database_for
from nagara.control.sql import Sql
from nagara.control.state import State
from nagara.pool.providers.simulated import SimulatedProvider, Trait, a_market
from nagara.pool.setup import PoolSetup
from nagara.pool.sizing import Policy
from nagara.testing.fake_node import FakeNode
from nagara.testing.pools import HealthyAgent, a_machine, an_offering

BROWSERS = ("chromium-headless-shell", "chromium")
# No sandbox: tests run as root, and open nothing but a page of ours.
BROWSER_ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def browser_program() -> str | None:
    """The system's Chromium, if there is one."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


def app_text(name: str = "smol", **keys: str) -> str:
    """An app file; keys are TOML values as text."""
    table = {"image": '"host"', "command": '["serve", "${PORT}"]', **keys}
    lines = "\n".join(f"{key} = {value}" for key, value in table.items())
    return f"[app.{name}]\n{lines}\n"


class PageStand:
    """What a test may do: deploy, call apps, script the node, read the token."""

    def __init__(self, folder: Path, pool: PoolSetup, port: int) -> None:
        self.folder = folder
        self.node = FakeNode(SystemClock())
        self.others: dict[str, FakeNode] = {}  # by address
        self.control = Control(folder, self.node, pool, nodes=self._other, port=port)
        self.loop: asyncio.AbstractEventLoop

    def _other(self, address: str) -> FakeNode:
        return self.others.setdefault(address, FakeNode(SystemClock()))

    @property
    def client(self) -> ControlClient:
        return connect(self.folder)

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def token(self) -> str:
        return (self.folder / "admin.token").read_text().strip()

    def deploy(self, *texts: str) -> None:
        self.client.deploy("".join(texts), "test")

    def call(self, app: str, path: str = "/health", body: str | None = None) -> int:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port)
        key = (self.folder / "api.key").read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("POST" if body else "GET", f"/{app}{path}", body, headers)
        response = connection.getresponse()
        response.read()
        connection.close()
        return response.status

    def on_loop(self, action: Callable[[], Any]) -> Any:
        """Runs `action` where the control process runs."""
        done: list[Any] = []
        is_done = threading.Event()

        def act() -> None:
            done.append(action())
            is_done.set()

        self.loop.call_soon_threadsafe(act)
        assert is_done.wait(30)
        return done[0]


class ThoroughAgent(HealthyAgent):
    """A machine whose longer checks do not come to an end."""

    async def check(self, kind: CheckKind) -> HealthReport:
        if kind is not CheckKind.BOOT:
            await asyncio.Event().wait()
        return await super().check(kind)


def pool_setup(slots: int, rented: int) -> PoolSetup:
    """This machine, and simulated ones of so many offerings, which are up at once."""
    setup = a_machine(slots)
    if not rented:
        return setup
    kinds = [
        an_offering(f"rack-{n}", provider="rack", region=f"eu-{n}", type="h100", price_h=2.5 + n)
        for n in range(rented)
    ]
    quick = Trait(boot_s=0.001, boot_spread=0.0)
    market = a_market([(kind, quick) for kind in kinds], name="rack", seed=1)
    return PoolSetup(
        setup.own, lambda name, address: ThoroughAgent(),
        (SimulatedProvider(market, SystemClock()),),
        Policy(least_free=slots + 2 * rented, spare_machines=0, utilisation=0.8),
        lambda type_: frozenset({"memory"}),
    )  # fmt: skip


@contextlib.contextmanager
def page_stand(folder: Path, slots: int = 8, port: int = 0, rented: int = 0) -> Iterator[PageStand]:
    """Brings it up; ends it again."""
    is_up = threading.Event()
    stands: list[PageStand] = []
    failures: list[BaseException] = []

    async def serve() -> None:
        stand = PageStand(folder, pool_setup(slots, rented), port)
        stand.loop = asyncio.get_running_loop()
        stands.append(stand)

        def ready(what: Ready) -> None:
            is_up.set()

        await stand.control.run(ready)
        for node in (stand.node, *stand.others.values()):
            await node.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)
            is_up.set()

    thread = threading.Thread(target=run, name="control")
    thread.start()
    try:
        assert is_up.wait(60)
        if failures:
            raise failures[0]
        yield stands[0]
    finally:
        if stands:
            with contextlib.suppress(RuntimeError):  # it has ended already
                stands[0].loop.call_soon_threadsafe(stands[0].control.stop)
        thread.join(60)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, "it did not come true"
        time.sleep(0.02)


def seed(folder: Path, apps: int, starts: int, *, name: str = "app") -> None:
    """Writes apps and a history of starts into a state folder that nobody uses."""

    async def fill() -> None:
        database = database_for(folder, None)
        await database.open()
        state = State(database, SystemClock())
        names = [f"{name}-{number:04d}" for number in range(apps)]
        for each in names:
            await state.put_app(parse_apps(app_text(each), "seed")[0])
        rows = [_start_row(random.Random(n), names, n) for n in reversed(range(starts))]

        def act(db: Sql) -> None:
            db.executemany(
                "INSERT INTO starts (replica, tenant, app, kind, stages, total_s, snapshot, error,"
                " fallback, started_s, files, host)"
                " VALUES (?, 'default', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )

        await database.run(act)
        await database.close()

    # In a thread: where a browser is driven, this one's loop is taken.
    thread = threading.Thread(target=lambda: asyncio.run(fill()))
    thread.start()
    thread.join()


def _start_row(chance: random.Random, names: list[str], number: int) -> tuple[Any, ...]:
    """One start as it might have been: a plain one is long in `host` and `device`."""
    app = names[number % len(names)]
    kind = chance.choices(("restored", "plain", None), (12, 5, 1))[0]
    shares = {
        "restored": {"acquire": 0.01, "files": 0.05, "host": 0.25, "device": 0.1, "canary": 0.1},
        "plain": {"acquire": 0.01, "files": 0.6, "host": 4.0, "device": 2.5, "canary": 0.0},
        None: {"acquire": 0.01, "files": 0.5, "host": 1.0},
    }[kind]
    stages = {stage: shares.get(stage, 0.0) * chance.uniform(0.6, 1.5) for stage in STAGES}
    total_s = sum(stages.values()) * 1.03
    is_restored = kind == "restored"
    files = {
        "kind": "venv", "way": "lazy", "objects": 4200, "size_bytes": 1_310_000_000,
        "read_objects": 900, "read_bytes": 212_000_000, "recorded_objects": None,
        "recorded_bytes": None, "prefetched_objects": 640, "prefetched_bytes": 150_000_000,
        "tiers": [{"tier": "local", "objects": 500, "size_bytes": 100_000_000},
                  {"tier": "zone", "objects": 400, "size_bytes": 112_000_000}],
    }  # fmt: skip
    return (
        f"{app}-{number:08x}", app, kind, json.dumps(with_unaccounted(stages, total_s)), total_s,
        "2f6c01" if is_restored else None,
        "the command ended with 1: no such file" if kind is None else None,
        "the snapshot is of another CPU" if kind == "plain" and number % 7 == 0 else None,
        time.time() - 40 * number, json.dumps(files) if kind else None,
        json.dumps({"tool": 0.6 * stages["host"], "read": 0.3 * stages["host"],
                    "hooks": 0.1 * stages["host"]}) if is_restored else None,
    )  # fmt: skip
