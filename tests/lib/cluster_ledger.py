"""Who served when, as the replicas themselves have written it down, and a client that never rests.

Every replica of `TICKING` writes the time of day every 20 ms for as long as it lives; its machine
keeps that as its log. Machines of a laboratory share one clock.
"""

import http.client
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.request import Request

from nagara.cli.lab_cluster import LabCluster

TRY_S = 5.0  # for one gateway of several: one that was stopped never answers

TICKING = (
    "import threading, time\n"
    "def tick():\n"
    "    while True:\n"
    "        print('tick', time.time(), flush=True)\n"
    "        time.sleep(0.02)\n"
    "threading.Thread(target=tick, daemon=True).start()\n"
)


@dataclass(frozen=True, slots=True)
class Life:
    """One replica, from its first tick to its last one so far."""

    replica: str
    machine: str
    begun_s: float
    ended_s: float


def lives(cluster: LabCluster, app: str) -> list[Life]:
    """All replicas of an app on all machines, in the order of their beginnings."""
    found = []
    for machine in cluster.lab.machines:
        for log in machine.state.glob(f"node/logs/default/{app}/*.log"):
            lines = log.read_text(errors="replace").splitlines()
            ticks = [float(line.split()[1]) for line in lines if _is_tick(line)]
            if ticks and "-capture-" not in log.name:
                found.append(Life(log.stem, machine.name, ticks[0], ticks[-1]))
    return sorted(found, key=lambda life: life.begun_s)


def _is_tick(line: str) -> bool:
    words = line.split()
    return len(words) == 2 and words[0] == "tick" and words[1].count(".") == 1


def overlaps(found: list[Life]) -> list[tuple[Life, Life]]:
    """Replicas that lived at the same time."""
    return [
        (one, other)
        for number, one in enumerate(found)
        for other in found[number + 1 :]
        if other.begun_s < one.ended_s
    ]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request."""

    sent_s: float
    took_s: float
    status: int | str
    replica: str


class Client:
    """Sends idempotent requests, one after another, until the block ends."""

    def __init__(self, cluster: LabCluster, path: str, *, patience_s: float = 90.0) -> None:
        instance = cluster.instance()
        self._request = Request(instance.url + path)
        self._request.add_header("authorization", f"Bearer {instance.key}")
        self._patience_s = patience_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[Answer] = []

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def replica(self) -> str:
        """Who has answered last."""
        return self.answers[-1].replica if self.answers else ""

    @property
    def lost(self) -> list[Answer]:
        """Requests without a good answer."""
        return [answer for answer in self.answers if answer.status != 200]

    def _run(self) -> None:
        while not self._ending.is_set():
            sent_s = time.time()
            status, replica = self._ask()
            self.answers.append(Answer(sent_s, time.time() - sent_s, status, replica))
            self._ending.wait(0.02)

    def _ask(self) -> tuple[int | str, str]:
        return self._ask_one(self._request, self._patience_s)

    @staticmethod
    def _ask_one(request: Request, limit_s: float) -> tuple[int | str, str]:
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                answer.read()
                return answer.status, _name(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code}: {error.read(500)!r}", _name(error.headers)
        except (OSError, http.client.HTTPException) as error:
            return repr(error), ""


class RetryingClient(Client):
    """Sends the same request to one gateway after another until it has a good answer.

    Only what has none from anybody before its patience is over is lost.
    """

    def __init__(self, cluster: LabCluster, path: str, urls: list[str]) -> None:
        super().__init__(cluster, path)
        self._requests = [Request(url + path, headers=self._request.headers) for url in urls]

    def _ask(self) -> tuple[int | str, str]:
        until_s = time.monotonic() + self._patience_s
        while True:
            status, replica = self._ask_one(self._requests[0], TRY_S)
            if status == 200 or time.monotonic() > until_s:
                return status, replica
            self._requests.append(self._requests.pop(0))
            time.sleep(0.05)


def _name(headers: Any) -> str:
    return str(headers.get("x-nagara-replica", ""))
