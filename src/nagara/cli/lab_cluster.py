"""nagara on the machines of a laboratory: control and gateway on the first, agents on all.

The first machine has the models and serves its objects to the others, which have nothing but
nagara and its tools. They are reached over TCP with a token, and with TLS if there are
certificates. Whoever uses it enters the first machine's network (`LabMachine.entered`).

With a PostgreSQL database the machines next to the first may have a control process, too, which
waits until it is its turn.
"""

import json
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.cli.instance import Instance
from nagara.cli.lab_machines import Inside, LabMachine, Laboratory
from nagara.cli.lab_rack import write_rack
from nagara.control.client import CONTROL_FILE, connect
from nagara.store.zone import FILE_NAME

AGENT_PORT, CACHE_PORT, GATEWAY_PORT, RAY_PORT = 9300, 7070, 8080, 6379
RAY_SETTINGS = {  # as a head that `nagara up` starts has them
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
_UP_S = 120.0


class LabCluster:
    """A running cluster.

    Args:
        state: the state folder that models and tools are taken from.
        certificates: each machine's folder; None: without TLS.
        devices: slots of each machine but the first.
        with_ray: the machines are those of a Ray cluster, which has the agents run; otherwise a
            program of a `command` provider lists them.
        own_slots: of the first.
        database: a PostgreSQL address for control's state; None: a file on the first machine.
        standbys: so many machines beside the first are for control alone, as the first is.

    Attributes:
        asked: the machine whose control process is meant by whoever asks `instance`.
    """

    def __init__(
        self,
        lab: Laboratory,
        state: Path,
        *,
        certificates: Sequence[Path] | None = None,
        devices: int = 2,
        own_slots: int = 0,
        with_ray: bool = False,
        database: str | None = None,
        standbys: int = 0,
    ) -> None:
        self.with_ray = with_ray
        self.lab = lab
        self.first, *rest = lab.machines
        self.standbys, self.others = rest[:standbys], rest[standbys:]
        self.asked = self.first
        self._database = database
        self._certificates = certificates
        self._token = lab.folder / "token"
        self._token.touch(mode=0o600)
        self._token.write_text(secrets.token_hex(32))
        self.agents: dict[str, Inside] = {}
        self.controls: dict[str, Inside] = {}
        self._key: str | None = None
        self._tools = state / "tools"
        for machine in lab.machines:
            self._equip(machine)
        if (state / "models").exists():
            (self.first.state / "models").symlink_to((state / "models").resolve())
        self._rack = lab.folder / "rack.json"
        write_rack(self._rack, [agent_address(machine) for machine in self.others], devices)
        self._pool = lab.folder / "pool.toml"
        self._write_pool(devices * len(self.others) + own_slots, own_slots)

    def _equip(self, machine: LabMachine) -> None:
        if self._tools.exists():
            (machine.state / "tools").symlink_to(self._tools.resolve())

    def _write_pool(self, slots: int, own_slots: int) -> None:
        if self.with_ray:
            table = ['kind = "ray"', f"slots = {slots // len(self.others)}", f"port = {AGENT_PORT}"]
            lines = ["[pool]", f"least_free = {slots}", "spare_machines = 0"]
            self._pool.write_text("\n".join([*lines, "[provider.cluster]", *table]) + "\n")
            return
        program = [sys.executable, "-P", "-m", "nagara.cli.lab_rack", str(self._rack)]
        verbs = ("offerings", "launch", "release", "machines")
        lines = [
            *("[pool]", f"least_free = {slots}", "spare_machines = 0"),
            *("[provider.rack]", 'kind = "command"'),
            *(f"{verb} = {json.dumps([*program, verb])}" for verb in verbs),
        ]
        if own_slots:
            lines += ["[provider.here]", 'kind = "local"', f"slots = {own_slots}"]
        self._pool.write_text("\n".join(lines) + "\n")

    def begin_agent(self, machine: LabMachine) -> None:
        """Starts the agent of a machine that is not the first."""
        arguments = ["agent", "--listen", f"{machine.address}:{AGENT_PORT}", *self._member(machine)]
        self.agents[machine.name] = machine.nagara(*arguments, log="agent.log")

    def begin_ray(self) -> None:
        """Starts Ray's head on the first machine and has the others join."""
        size = ["--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats"]
        for machine in self.lab.machines:
            role = [f"--address={self.ray_address}"]
            if machine is self.first:
                role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
                role += ["--temp-dir=/run/ray"]  # a short path, and on each machine its own
            machine.spaces.run(
                *(sys.executable, "-P", "-m", "ray.scripts.scripts", "start", *role, *size),
                f"--node-ip-address={machine.address}",
                env={**machine.environment, **RAY_SETTINGS},
            )

    @property
    def ray_address(self) -> str:
        """Of the head."""
        return f"{self.first.address}:{RAY_PORT}"

    @property
    def control(self) -> Inside | None:
        """The first machine's control process."""
        return self.controls.get(self.first.name)

    def begin_control(self, *arguments: str) -> None:
        """Starts the first machine's control process and agent, and returns when it serves."""
        self._begin_control(self.first, *arguments)
        self.until_serving(self.first)

    def begin_standby(self, machine: LabMachine) -> None:
        """Starts another machine's, and returns when it waits for its turn."""
        control = self._begin_control(machine)
        wait_for(
            lambda: "waiting for it" in control.said() or control.exit_code is not None,
            "the other control process does not wait",
        )

    def _begin_control(self, machine: LabMachine, *arguments: str) -> Inside:
        (machine.state / CONTROL_FILE).unlink(missing_ok=True)
        # The first one's client is on the same machine; others are asked from there.
        host = () if machine is self.first else ("--host", machine.address)
        control = self.controls[machine.name] = machine.nagara(
            *("up", *host, "--port", str(GATEWAY_PORT), "--pool", str(self._pool)),
            *("--cache", f"{machine.address}:{CACHE_PORT}", *self._member(machine)),
            *(("--cluster", self.ray_address) if self.with_ray else ()),
            *(("--database", self._database) if self._database is not None else ()),
            *arguments,
            log="up.log",
        )
        return control

    def until_serving(self, machine: LabMachine) -> None:
        """Returns when the machine's control process serves. Raises `NagaraError`."""
        control = self.controls[machine.name]
        wait_for(
            lambda: (machine.state / CONTROL_FILE).exists() or control.exit_code is not None,
            "control does not come up",
        )
        if control.exit_code is not None:
            raise NagaraError(f"control ended at once; it said:\n{control.said()}")

    def _member(self, machine: LabMachine) -> list[str]:
        given = ["--token-file", str(self._token)]
        if self._certificates is not None:
            number = self.lab.machines.index(machine)
            given += ["--certificates", str(self._certificates[number])]
        return given

    def until_ready(self, count: int, limit_s: float = _UP_S) -> None:
        """Returns when so many of the other machines may be given replicas; they are launched once
        an app is deployed."""
        wait_for(
            lambda: len(self.ready_machines()) >= count, "the machines do not become ready", limit_s
        )

    def ready_machines(self) -> list[str]:
        """Addresses of the other machines that are ready."""
        return sorted(self._ready() - {""})

    def _ready(self) -> set[str]:
        machines = self.instance().admin.pool()["machines"]
        return {one["address"] for one in machines if one["state"] == "ready"}

    def only(self, *machines: LabMachine) -> None:
        """From now on replicas go to these machines alone."""
        wanted = {"" if one is self.first else agent_address(one) for one in machines}
        admin = self.instance().admin
        for one in admin.pool()["machines"]:
            if one["address"] in wanted and one["state"] == "draining":
                admin.order_machine(one["name"], "resume")
            if one["address"] not in wanted and one["state"] == "ready":
                admin.order_machine(one["name"], "drain")
        wait_for(lambda: self._ready() == wanted, "other machines are used")

    def until_told(self, machine: LabMachine) -> None:
        """Returns when the machine knows where its zone's objects are."""
        told = machine.state / "store" / FILE_NAME
        wait_for(told.exists, "the machine is not told of the zone's caches")

    def until_touches_known(self, app: str) -> None:
        """Returns when the first machine tells others what the app's newest snapshot reads."""
        entries = self.first.state / "store/tenants/default/roots/snapshots" / f"{app}~"

        def is_known() -> bool:
            found = json.loads(entries.read_bytes())["entries"].values() if entries.exists() else ()
            newest = max(found, key=lambda entry: entry["created_at_s"], default={"touches": 0})
            return bool(newest["touches"])

        wait_for(is_known, "it is not known what the snapshot reads")

    def renew(self, machine: LabMachine) -> LabMachine:
        """Another machine in the place of one: same address, nothing on it but an agent."""
        new = self.lab.renew(self.lab.machines.index(machine))
        self.others[self.others.index(machine)] = new
        self._equip(new)
        self.begin_agent(new)
        return new

    def instance(self) -> Instance:
        """How `asked` is asked, from inside the first machine's network."""
        admin = connect(self.asked.state)
        if self._key is None:
            self._key = admin.add_key("laboratory")
        log = self.asked.folder / "up.log"
        return Instance(admin, admin.url, self._key, self.asked.state, log)

    def end(self) -> None:
        """Ends control in order, whoever waits for his turn first, then the agents."""
        for name in sorted(self.controls, key=lambda name: name == self.asked.name):
            if (control := self.controls[name]).exit_code is None:
                control.end(timeout_s=60)
        for agent in self.agents.values():
            agent.end(signal.SIGTERM)


@contextmanager
def running_cluster(cluster: LabCluster) -> Iterator[LabCluster]:
    """Brings everything up, inside the first machine's network, and down again."""
    with cluster.first.entered():
        if cluster.with_ray:
            cluster.begin_ray()
        else:
            for machine in cluster.others:
                cluster.begin_agent(machine)
        cluster.begin_control()
        try:
            for machine in cluster.standbys:
                cluster.begin_standby(machine)
            yield cluster
        finally:
            cluster.end()


def agent_address(machine: LabMachine) -> str:
    """Where control reaches the machine's agent."""
    return f"tcp://{machine.address}:{AGENT_PORT}"


def wait_for(is_so: Callable[[], object], otherwise: str, limit_s: float = _UP_S) -> None:
    """Returns when it is so. Raises `NagaraError` saying what was not."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise NagaraError(f"{otherwise} within {limit_s:g} s")
        time.sleep(0.05)
