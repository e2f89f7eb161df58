"""The pool's file: policy, providers, and demands to plan for where none has been measured.

[pool]
service = 0.99              # quantile the reserve is sized for
utilisation = 0.8           # of all devices, at the planned peak: 0.65 to 0.80
spread = 0.4                # share of a demand in one failure domain at no extra cost
spare_machines = 1          # beside the buffer, for each type in use
least_free = 0              # slots free at any time

[provider.here]
kind = "local"
slots = 2

[provider.rack]
kind = "command"            # each: program and arguments, JSON in and out
offerings = ["./offerings"]
launch = ["./launch"]
release = ["./release"]
machines = ["./machines"]
ramp = 10                   # launches at once

[provider.clouds]
kind = "skypilot"
types = ["H100", "H200"]

[provider.cluster]
kind = "ray"                # machines of a Ray cluster
address = "auto"            # as Ray takes it; `nagara up --cluster` says it, too
slots = 8                   # on each machine without devices  [default: one a core]
port = 9300                 # where agents listen  [default: any free one]
state = "/var/lib/nagara"   # folders on each of its machines
certificates = "/etc/nagara/certificates"
price_h = {h100 = 2.5}      # of a machine, by its devices' type
adds = [{type = "h100", devices = 8, cpu = 96, most = 4}]  # what Ray's autoscaler may add

[[demand]]                  # for `nagara pool plan --file`
types = ["h100"]
regions = ["eu-*"]
devices = 1                 # of one machine
slots = 12
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from nagara.contract.cluster import ClusterEngine, MachineKind
from nagara.contract.machine import Offering, Provider
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.errors import PoolFileError
from nagara.pool.explain import explain
from nagara.pool.machines import Saved
from nagara.pool.meters import Meters
from nagara.pool.problem import Demand, Plan, Problem
from nagara.pool.providers.command import CommandProvider
from nagara.pool.providers.local import LocalProvider
from nagara.pool.providers.ray import AddedKind, RayProvider, RayTerms
from nagara.pool.providers.skypilot import SkypilotProvider
from nagara.pool.runner import Runner
from nagara.pool.sizing import Policy, label, make_problem

_VERBS = ("offerings", "launch", "release", "machines")
_KINDS: dict[str, tuple[str, ...]] = {
    "local": ("slots",),
    "command": (*_VERBS, "ramp", "timeout_s"),
    "skypilot": ("types",),
    "ray": ("address", "slots", "port", "state", "certificates", "price_h", "adds", "ramp"),
}
_ADDED_KEYS = ("type", "devices", "cpu", "memory_gib", "most")
_RANGES = {
    "service": (0.5, 0.9999),
    "utilisation": (0.65, 0.80),
    "spread": (0.1, 1.0),
    "spare_machines": (0, 100),
    "least_free": (0, 100_000),
}


Engines = Callable[[Mapping[str, Any]], ClusterEngine]  # by the table of a `ray` provider


@dataclass(frozen=True, slots=True)
class WantedSlots:
    """Demand as a person states it."""

    wanted: DemandClass
    slots: int


@dataclass(frozen=True, slots=True)
class PoolFile:
    """What the file says. `providers` are opened with `open_providers`."""

    path: Path
    policy: Policy
    providers: Mapping[str, Mapping[str, Any]]
    demands: tuple[WantedSlots, ...]


def read_pool_file(path: Path) -> PoolFile:
    """Raises `PoolFileError` naming the key and what is allowed."""
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise PoolFileError(f"cannot be read: {error.strerror}", where=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise PoolFileError(f"is no TOML: {error}", where=str(path)) from error
    reader = _Reader(path)
    reader.only(document, ("pool", "provider", "demand"), "")
    providers = document.get("provider", {})
    for name, table in providers.items():
        reader.provider(name, table)
    if sum(table["kind"] == "local" for table in providers.values()) > 1:
        raise reader.fail("two providers are local: this machine is there only once")
    return PoolFile(
        path,
        reader.policy(document.get("pool", {}), providers),
        providers,
        tuple(reader.demand(one) for one in document.get("demand", [])),
    )


def own_slots(file: PoolFile) -> int | None:
    """How many replicas the machine that reads the file may run; None: it runs none."""
    local = [one["slots"] for one in file.providers.values() if one["kind"] == "local"]
    return local[0] if local else None


def ray_tables(file: PoolFile) -> list[Mapping[str, Any]]:
    """The providers whose machines are a Ray cluster's."""
    return [one for one in file.providers.values() if one["kind"] == "ray"]


def open_providers(file: PoolFile, engines: Engines | None = None) -> tuple[Provider, ...]:
    """Those that launch machines; programs are looked for beside the file.

    Args:
        engines: reaches the engine of a `ray` provider.

    Raises:
        PoolFileError: the file has such a provider, and nobody can reach it.
    """
    opened: list[Provider] = []
    for name, table in file.providers.items():
        if table["kind"] == "local":
            continue
        if table["kind"] == "command":
            commands = {verb: _beside(file.path, table[verb]) for verb in _VERBS}
            opened.append(CommandProvider(name, commands, limit_s=table.get("timeout_s", 120)))
        elif table["kind"] == "ray":
            if engines is None:
                raise PoolFileError(
                    f"provider.{name}: what a cluster has is known only while it is in use",
                    where=str(file.path), hint="ask the running one: nagara pool plan",
                )  # fmt: skip
            opened.append(RayProvider(name, engines(table), ray_terms(table)))
        else:
            opened.append(SkypilotProvider(name, tuple(table.get("types", ()))))
    return tuple(opened)


def ray_terms(table: Mapping[str, Any]) -> RayTerms:
    """What a table says of the cluster's machines."""
    adds = []
    for one in table.get("adds", ()):
        memory = int(one.get("memory_gib", 0) * 2**30)
        kind = MachineKind(one["type"], one.get("devices", 0), float(one["cpu"]), memory)
        adds.append(AddedKind(kind, one.get("most", 1)))
    return RayTerms(table.get("slots"), table.get("price_h"), tuple(adds))


def _beside(file: Path, command: list[str]) -> tuple[str, ...]:
    program = command[0]
    if "/" in program:
        # Links are left alone: an environment's interpreter is one, and knows itself by its path.
        program = str((file.parent / program).absolute())
    return (program, *command[1:])


@dataclass(frozen=True, slots=True)
class _Reader:
    path: Path

    def fail(self, what: str, hint: str | None = None) -> PoolFileError:
        return PoolFileError(what, where=str(self.path), hint=hint)

    def only(self, table: Any, allowed: tuple[str, ...], where: str) -> None:
        if not isinstance(table, dict):
            raise self.fail(f"{where or 'the file'} is no table")
        for key in table:
            if key not in allowed:
                raise self.fail(
                    f"{where}{'.' if where else ''}{key} is not a key",
                    hint=f"allowed: {', '.join(allowed)}",
                )

    def provider(self, name: str, table: Any) -> None:
        where = f"provider.{name}"
        kind = table.get("kind") if isinstance(table, dict) else None
        if kind not in _KINDS:
            raise self.fail(f"{where}.kind is {kind!r}", hint=f"one of: {', '.join(_KINDS)}")
        self.only(table, ("kind", *_KINDS[kind]), where)
        if kind == "local" and not _is_whole(table.get("slots"), 1):
            raise self.fail(f"{where}.slots must be a whole number from 1")
        if kind == "ray":
            self.ray(where, table)
        for verb in _VERBS if kind == "command" else ():
            command = table.get(verb)
            if (
                not isinstance(command, list)
                or not command
                or not all(isinstance(one, str) for one in command)
            ):
                raise self.fail(f"{where}.{verb} must be a list: program and arguments")
        for key in ("ramp", "timeout_s"):
            if key in table and not _is_whole(table[key], 1):
                raise self.fail(f"{where}.{key} must be a whole number from 1")

    def ray(self, where: str, table: Mapping[str, Any]) -> None:
        for key in ("address", "state", "certificates"):
            if not isinstance(table.get(key, ""), str):
                raise self.fail(f"{where}.{key} must be a text")
        for key in ("slots", "port"):
            if key in table and not _is_whole(table[key], 1):
                raise self.fail(f"{where}.{key} must be a whole number from 1")
        prices = table.get("price_h", {})
        if not isinstance(prices, dict) or not all(map(_is_amount, prices.values())):
            raise self.fail(f"{where}.price_h must be a table of numbers from 0, by type")
        if not isinstance(table.get("adds", []), list):
            raise self.fail(f"{where}.adds must be a list of tables")
        for one in table.get("adds", []):
            self.only(one, _ADDED_KEYS, f"{where}.adds")
            if not isinstance(one.get("type"), str) or not _is_amount(one.get("cpu")):
                raise self.fail(f"{where}.adds: each needs a type and how many cpu")
            if not _is_amount(one.get("memory_gib", 0)):
                raise self.fail(f"{where}.adds.memory_gib must be a number from 0")
            for key, least in (("devices", 0), ("most", 1)):
                if not _is_whole(one.get(key, least), least):
                    raise self.fail(f"{where}.adds.{key} must be a whole number from {least}")

    def policy(self, table: Any, providers: Mapping[str, Mapping[str, Any]]) -> Policy:
        self.only(table, tuple(_RANGES), "pool")
        for key, value in table.items():
            low, high = _RANGES[key]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not low <= value <= high:
                raise self.fail(f"pool.{key} must be a number from {low:g} to {high:g}")
        ramps = tuple((name, one["ramp"]) for name, one in providers.items() if "ramp" in one)
        kinds = {field.name: field.type for field in fields(Policy)}
        whole = {key: int(v) if kinds[key] in (int, "int") else v for key, v in table.items()}
        return Policy(**whole, ramps=ramps)

    def demand(self, table: Any) -> WantedSlots:
        self.only(table, ("types", "regions", "devices", "slots"), "demand")
        if not _is_whole(table.get("slots"), 1):
            raise self.fail("demand.slots must be a whole number from 1")
        if not _is_whole(table.get("devices", 1), 1):
            raise self.fail("demand.devices must be a whole number from 1")
        for key in ("types", "regions"):
            if not all(isinstance(one, str) for one in table.get(key, [])):
                raise self.fail(f"demand.{key} must be a list of names")
        types = table.get("types")
        wanted = DemandClass(
            None if types is None else frozenset(types),
            tuple(table.get("regions", ())),
            table.get("devices", 1),
        )
        return WantedSlots(wanted, table["slots"])


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


async def plan_of_file(file: PoolFile, state: Path) -> dict[str, Any]:
    """What would be planned for an empty pool with the file's demands. Launches nothing."""
    offerings: list[Offering] = []
    slots = own_slots(file)
    local = () if slots is None else (LocalProvider(slots, state),)
    for provider in (*local, *open_providers(file)):
        offerings += await provider.offerings()
    core = PoolCore(Saved("none"), lambda: "none", 0.0)
    bare = make_problem(core, offerings, Meters(), file.policy, 0.0)
    highest = max((one.price_h for one in bare.offers), default=1.0)
    demands = tuple(
        Demand(
            label(one.wanted), one.wanted, float(one.slots * one.wanted.devices), 100 * highest + 1
        )
        for one in file.demands
    )
    # What has never been tried would get one machine: a person wants to see the whole plan.
    stocks = {one.id: 1000 if one.stock is None else one.stock for one in offerings}
    offers = tuple(replace(offer, supply=stocks[offer.id]) for offer in bare.offers)
    problem = Problem(offers, demands, bare.rules)
    return plan_document(problem, await Runner().plan(problem))


def plan_document(problem: Problem, plan: Plan) -> dict[str, Any]:
    """A plan as JSON, with its explanation."""
    return {
        "source": plan.source,
        "note": plan.note,
        "launches": [list(one) for one in plan.launches],
        "releases": [list(one) for one in plan.releases],
        "shortages": [list(one) for one in plan.shortages],
        "bindings": [[one.kind, one.subject, one.worth] for one in plan.bindings],
        "demands": {one.name: one.quantity for one in problem.demands},
        "objective": plan.objective,
        "words": explain(problem, plan),
    }
