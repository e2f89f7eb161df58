"""nagara on the machines of a laboratory, as its users see it."""

import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster_ledger import Client

from nagara.cli.lab_cluster import LabCluster, running_cluster, wait_for
from nagara.cli.lab_machines import LabMachine, laboratory

OBEDIENT = (Path(__file__).parent.parent / "apps/obedient.py").read_text()
ANSWER_S = 90.0
LEAST_FREE = 0.08  # of the disk: a machine with less than 5 % is not given replicas

is_long = pytest.mark.skipif(
    not os.environ.get("NAGARA_CLUSTER"), reason="make test-cluster runs it: it takes minutes"
)

MakeCluster = Callable[..., AbstractContextManager["Cluster"]]


class Cluster(LabCluster):
    """What a test asks of a running cluster, from inside the first machine's network."""

    def venv(self) -> str:
        """The image of an environment that only the first machine has."""
        folder = self.first.folder / "only-here"
        folder.mkdir()
        self.first.spaces.run("mount", "-t", "tmpfs", "here", str(folder))
        self.first.spaces.run("python3", "-m", "venv", "--without-pip", str(folder / "venv"))
        return f"venv:{folder}/venv"

    def deploy(
        self, image: str, *more: str, name: str = "obedient", snapshot: bool = True, first: str = ""
    ) -> None:
        canary = 'snapshot = {canary = {path = "/canary"}}' if snapshot else "snapshot = false"
        lines = [
            f"[app.{name}]",
            f"image = {json.dumps(image)}",
            f"command = {json.dumps(['python', '-S', '-c', OBEDIENT])}",
            f'env = {{LISTEN = "${{PORT}}", FIRST = {json.dumps(first)}}}',
            'ready = "/"',
            canary,
            *more,
        ]
        self.instance().admin.deploy("\n".join(lines) + "\n", "obedient.toml")

    def get(self, path: str) -> tuple[int, bytes, Any]:
        """(status, body, headers) of a request to the gateway."""
        instance = self.instance()
        request = urllib.request.Request(instance.url + path)
        request.add_header("authorization", f"Bearer {instance.key}")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(), error.headers

    def starts(self, name: str = "obedient") -> list[dict[str, Any]]:
        """The app's starts, newest first."""
        starts: list[dict[str, Any]] = self.instance().admin.trace(name)["starts"]
        return starts

    def roots(self, machine: LabMachine, kind: str) -> list[str]:
        """What a machine's store calls its own."""
        return sorted(
            path.name
            for path in machine.state.glob(f"store/tenants/default/roots/{kind}/*")
            if path.name[0] != "."
        )

    def replicas_on(self, machine: LabMachine) -> list[str]:
        """Names of the replicas that a machine has anything of."""
        return sorted(path.name for path in machine.state.glob("node/replicas/[!.]*"))

    def machine_of(self, replica: str) -> LabMachine:
        (found,) = (one for one in self.lab.machines if replica in self.replicas_on(one))
        return found

    def until_another_answers(self, client: Client, before: str) -> float:
        """Seconds until a replica other than `before` has answered, without those of its start.

        That takes what three machines and their client on the same cores make of it.
        """
        begun_s = time.monotonic()
        wait_for(lambda: client.replica not in ("", before), "it is not replaced")
        waited_s = time.monotonic() - begun_s
        (start,) = (one for one in self.starts() if one["replica"] == client.replica)
        print(f"replaced after {waited_s:.1f} s; its start took {start['total_s']:.1f} s of them")
        return waited_s - float(start["total_s"])

    def logs(self) -> str:
        """What every process of every machine has said last."""
        return "\n".join(
            f"--- {machine.name} {log.name}\n{log.read_text(errors='replace')[-6000:]}"
            for machine in self.lab.machines
            for log in sorted(machine.folder.glob("*.log"))
        )


@pytest.fixture
def cluster(tmp_path: Path, state_dir: Path, tools: object) -> Iterator[MakeCluster]:
    """Makes one; what its processes have said is shown with a failure."""

    disk = shutil.disk_usage(tmp_path)
    if disk.free < LEAST_FREE * disk.total:
        pytest.skip(f"needs a disk with {LEAST_FREE:.0%} free for its machines")

    @contextmanager
    def make(count: int = 3, **settings: Any) -> Iterator[Cluster]:
        prepare = settings.pop("prepare", lambda machines: None)
        with laboratory(tmp_path / "lab", count) as lab:
            prepare(lab.machines)
            made = Cluster(lab, state_dir, **settings)
            try:
                with running_cluster(made):
                    yield made
            finally:
                print(made.logs())
        assert list((tmp_path / "lab").iterdir()) == []

    return make


__all__ = ["wait_for"]
