"""Messages between control and node: what to start, what came of it.

All are frozen dataclasses of plain values, so that they cross a Unix socket or a network
unchanged. Durations are seconds, sizes are bytes, times of day are seconds since the epoch.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class StartKind(StrEnum):
    """How a replica came to be."""

    PLAIN = "plain"  # its command was run from the beginning
    RESTORED = "restored"  # its memory was put back from a snapshot


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to one slot of one machine. A later grant of the same slot has a higher epoch.

    `expires_at_s` is None on a single machine: the kernel that runs the replica is the fence.
    """

    slot: str
    epoch: int
    expires_at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What one replica may use at most; None leaves it to the machine."""

    cpu: float | None = None  # cores
    memory_bytes: int | None = None
    disk_bytes: int | None = None  # of its own layer


@dataclass(frozen=True, slots=True)
class ModelMount:
    """A model folder of this machine, shown read-only to the replica at /models/NAME."""

    name: str
    digest: str  # names the content, so a snapshot made with other weights does not fit


@dataclass(frozen=True, slots=True)
class Canary:
    """The request whose known answer a restored replica must give before it may serve.

    `is_openai` compares the parts of an OpenAI answer that a greedy request determines (texts,
    finish reasons and, nearly, the first logprob, not ids and times); otherwise status and body
    must be equal byte for byte.
    """

    path: str
    body: str | None = None  # JSON text; None sends a GET
    is_openai: bool = False


@dataclass(frozen=True, slots=True)
class HookStep:
    """One thing a replica is asked to do around a snapshot: a request to its port, or a command
    run inside it. Exactly one of `path` and `command` is set.

    `body` is JSON text. A request carries the replica's own token, as `Authorization: Bearer`.
    """

    path: str | None = None
    method: str = "POST"
    body: str | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotHooks:
    """What is done before a replica is saved, and in each one put back before it serves.

    `in_python`: its Python processes listen for nagara, without a change to their code: they give
    unused memory back before, and renew their random generators after.
    `rebuilds_communicators`: what connects its processes on several devices is torn down before
    and built anew after, by the steps or by functions of its own.
    """

    before: tuple[HookStep, ...] = ()
    after: tuple[HookStep, ...] = ()
    in_python: bool = False
    rebuilds_communicators: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotRules:
    """How an app's snapshot is made.

    `is_wide`: its libraries are told to use less than this CPU has, so that it fits lesser ones.
    `with_secrets`: the replica that is saved gets the app's secrets, and the snapshot holds them.
    """

    is_wide: bool = False
    with_secrets: bool = False


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Everything a node must know of an app in order to run a replica of it.

    `command` may contain `${PORT}`; so may the values of `env`. `secrets` are the values of
    `secret_names` for one replica: they are no part of what the app is, and are never kept.
    """

    tenant: str
    app: str
    definition: str  # digest of the app definition: another definition never shares a snapshot
    image: str
    command: tuple[str, ...]
    port: int  # inside the replica's own network namespace
    ready_path: str
    canary: Canary
    models: tuple[ModelMount, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    limits: Limits = Limits()
    start_timeout_s: float = 600.0
    snapshot: bool = True  # restore from one where it fits
    hooks: SnapshotHooks = SnapshotHooks()
    rules: SnapshotRules = SnapshotRules()
    devices: tuple[str, ...] = ()  # of the machine, by their CDI names: `nvidia.com/gpu=0`
    image_index: str | None = None  # names the tree that `image` was at deployment; not for `host`
    secret_names: tuple[str, ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    network: str = "none"  # or "egress": it reaches what the machine reaches


@dataclass(frozen=True, slots=True)
class ImageOrder:
    """Bring an app's image, and the models it is to show, to the machine.

    `image` is a source as in an app file: `dir:PATH`, `venv:PATH`, ..., or `image:NAME`.
    """

    tenant: str
    app: str
    image: str
    models: tuple[ModelMount, ...] = ()


@dataclass(frozen=True, slots=True)
class ImageReport:
    """An image that is ready to be started from."""

    index: str  # equal for equal trees
    files: int
    size_bytes: int
    new_bytes: int  # contents that were not in the store before
    missing: tuple[str, ...] = ()  # libraries that its programs need and this machine lacks
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierRead:
    """What came from one tier of the store."""

    tier: str
    objects: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsRead:
    """Weights that a server has read, at its start or again after it was put back."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FilesReport:
    """How a replica's files became visible, and what its start read of them.

    `read_*` are None where nobody counts: contents that are all on this machine are read by the
    kernel without asking anyone. Objects above 64 MiB count by the 4 MiB chunks that were touched.
    """

    kind: str  # "host", "venv", "oci", ...
    way: str  # "host", "local", "lazy", "tree" or "copy"
    objects: int = 0  # of the image and its models together
    size_bytes: int = 0
    read_objects: int | None = None
    read_bytes: int | None = None
    recorded_objects: int | None = None  # what the image's recorded starts have read, if any
    recorded_bytes: int | None = None
    prefetched_objects: int = 0
    prefetched_bytes: int = 0
    weights: WeightsRead | None = None  # where the server says so: nagara's engine does
    tiers: tuple[TierRead, ...] = ()  # for all replicas of the tenant meanwhile, nearest first


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Start one replica under a lease and give it back ready to serve."""

    replica: str
    lease: Lease
    spec: ReplicaSpec


@dataclass(frozen=True, slots=True)
class StartReport:
    """A replica that is ready: how it was started and where the time went.

    `host`, of a restored one: seconds of the host stage by part, which add up to it.

        tool         the checkpoint tool, beside the next two
        read, map    the tool reading saved memory, and laying out address spaces
        runtime      making the container around the tool
        hooks        the replica's new identity, and its own functions
        unaccounted  the rest
    """

    replica: str
    kind: StartKind
    stages: dict[str, float]  # seconds by stage, without acquire and without the remainder
    elapsed_s: float  # from the order's arrival at the node to ready
    snapshot: str | None = None  # the snapshot it was restored from
    fallback: str | None = None  # why a restore was not possible or failed; None when not tried
    failed_snapshot: str | None = None  # the snapshot whose restore was tried and failed
    capture_wanted: bool = False  # no snapshot fits this machine yet
    files: FilesReport | None = None
    host: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class CaptureOrder:
    """Start a replica that never serves, snapshot it, end it."""

    replica: str
    lease: Lease
    spec: ReplicaSpec


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A published snapshot, or the reason why there is none."""

    snapshot: str | None
    reason: str | None = None
    memory_bytes: int = 0  # page images and metadata
    layer_bytes: int = 0  # the frozen upper layer
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SnapshotStatus:
    """One snapshot as a machine sees it: one variant of what is saved under an app's key.

    `state` is "good", "partly here", "stale", "in quarantine" or "damaged".
    `cpu_flags` is what a host must offer to restore it; `misfit` says why this machine does not.
    `failures` are the restores in a row that failed by its fault.
    """

    machine: str
    tenant: str
    app: str
    snapshot: str
    key: str
    state: str
    cpu_flags: tuple[str, ...] = ()
    is_wide: bool = False  # made to need less than the CPU it was made on has
    misfit: str | None = None
    memory_bytes: int = 0
    layer_bytes: int = 0
    stored_bytes: int = 0  # its objects in the store
    shared_bytes: int = 0  # of them those that other snapshots need as well
    here_bytes: int | None = None  # on this machine; None: all of it
    created_at_s: float = 0.0
    failures: int = 0
    reasons: tuple[str, ...] = ()  # what is not carried, why it failed or does not count


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica as its machine sees it."""

    replica: str
    tenant: str
    app: str
    definition: str
    lease: Lease
    ready: bool
    exit_code: int | None = None  # None while it runs; negative is the signal that ended it
    detail: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskReport:
    """What a node keeps on its disk, by part, and what it has removed of it, by kind. Bytes."""

    limit_bytes: int | None  # None: not bounded
    parts: tuple[tuple[str, int], ...]
    removed: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaUsage:
    """What a replica uses of what it may use; None: not known, or not bounded.

    Memory is what cannot be taken from it at once: file content that is merely cached is left out.
    `device` is how busy the busiest of its devices was at last, from 0 to 1.
    """

    replica: str
    at_s: float  # when it was read, by the machine's monotonic clock
    cpu_s: float  # CPU seconds since its start
    cores: float  # that it may use
    memory_bytes: int
    memory_limit_bytes: int
    disk_bytes: int | None = None
    disk_limit_bytes: int | None = None
    device: float | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a machine is and how it starts replicas."""

    machine: str
    cores: int
    memory_bytes: int
    isolation: str  # "container" or "process"
    can_snapshot: bool
    missing: tuple[str, ...] = ()  # what the machine lacks for the full path, in words
    bringing: tuple[str, ...] = ()  # images on their way to this machine, in words
    cache: str | None = None  # where other machines find its objects, if it serves them
    host_class: str = ""  # a snapshot made on one machine of a class fits all others of it
