"""What a user deploys, as frozen values. Pure: no I/O, no clock.

`App.definition` is the digest of everything that decides what a replica of the app *is*: image,
models, command, port, readiness, device, environment, limits, network, canary and snapshot hooks.
How many replicas there are and how long requests may wait is left out, so that changing
`scale.max` or a time-out costs no snapshot.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property

from nagara.contract.replica import (
    Canary,
    Limits,
    ModelMount,
    ReplicaSpec,
    SnapshotHooks,
    SnapshotRules,
)
from nagara.control.cron import Entry

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Scale:
    """How many replicas there may be, and when. `idle_s` None leaves it to the autoscaler."""

    min: int = 0
    max: int = 4
    concurrency: int = 8
    idle_s: float | None = None
    buffer: int = 0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `queue_s` None leaves it to the gateway: a start's time-out at most."""

    start_s: float = 600.0
    request_s: float = 600.0
    queue_s: float | None = None


@dataclass(frozen=True)  # without slots: `definition` is kept beside the fields
class App:
    """One app of an app file, with every default filled in."""

    name: str
    image: str
    command: tuple[str, ...]
    port: int
    ready: str
    canary: Canary
    tenant: str = DEFAULT_TENANT
    models: tuple[str, ...] = ()
    device: str = "any"
    devices: tuple[str, ...] = ()  # of the machine, by their CDI names
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()  # by name
    limits: Limits = field(default_factory=Limits)
    scale: Scale = Scale()
    timeouts: Timeouts = Timeouts()
    snapshot: bool = True
    hooks: SnapshotHooks = field(default_factory=SnapshotHooks)
    rules: SnapshotRules = field(default_factory=SnapshotRules)
    image_index: str | None = None  # the tree that `image` was at deployment; None for `host`
    schedule: tuple[Entry, ...] = ()
    priority: int = 0
    regions: tuple[str, ...] = ()  # patterns; empty: any
    network: str = "none"  # or "egress"
    served_model: str | None = None  # the name its OpenAI server knows its model by

    @cached_property
    def definition(self) -> str:
        """Hexadecimal SHA-256 over the canonical JSON of what makes a replica."""
        canonical = json.dumps(self._replica_parts(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _replica_parts(self) -> dict[str, object]:
        # What came later is named only where it is chosen: older definitions stay what they are.
        later: dict[str, object] = {} if self.network == "none" else {"network": self.network}
        if self.limits.disk_bytes is not None:
            later["disk"] = self.limits.disk_bytes
        return {
            **later,
            "tenant": self.tenant,
            "app": self.name,
            "image": self.image if self.image_index is None else [self.image, self.image_index],
            "models": self.models,
            "command": self.command,
            "port": self.port,
            "ready": self.ready,
            "device": self.device,
            "devices": self.devices,
            "env": sorted(self.env),
            "limits": [self.limits.cpu, self.limits.memory_bytes],
            "canary": [self.canary.path, self.canary.body, self.canary.is_openai],
            "hooks": asdict(self.hooks),
            "rules": asdict(self.rules),
            "secrets": self.secrets,
        }

    def spec(self, mounts: tuple[ModelMount, ...]) -> ReplicaSpec:
        """What a node must know. `mounts` are the app's models as this machine has them."""
        return ReplicaSpec(
            tenant=self.tenant,
            app=self.name,
            definition=self.definition,
            image=self.image,
            command=self.command,
            port=self.port,
            ready_path=self.ready,
            canary=self.canary,
            models=mounts,
            env=self.env,
            limits=self.limits,
            devices=self.devices,
            start_timeout_s=self.timeouts.start_s,
            snapshot=self.snapshot,
            hooks=self.hooks,
            rules=self.rules,
            image_index=self.image_index,
            secret_names=self.secrets,
            network=self.network,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which an OpenAI client may ask for the app."""
        names = [self.name, *self.models]
        if self.served_model is not None:
            names.append(self.served_model)
        return tuple(dict.fromkeys(names))
