"""The pool's linear programme.

    min  Σ p·n − Σ (p − κ)·r + Σ w·s + Σ γ·c + ε·Σ(n + r)

    Σ_d a·y_gd <= ρ·G·Σ_{o in g} (I + B + n − r)       capacity below 100 %
    Σ_g y_gd + s_d >= Q_d                              demand, buffer included
    n_o <= U_o,  r_o <= idle_o,  Σ n of a provider <= its ramp
    Σ_{g in f} y_gd <= φ·Q_d + c_fd                    no failure domain carries too much

A failure domain f is one provider's region. y exists only where type and region are allowed.
a = G ÷ (k·⌊G ÷ k⌋) is what k-device claims waste of a machine of G devices, or more where CPU,
memory or disk run out before the devices.

Two exact reductions keep it small. A spread row is left out where all that could ever stand in
the domain is below φ·Q. And assignments are made to groups g of offers that can take each
other's place: equal size, equal demands accepted and, where a spread row looks at it, equal
domain.

With scenarios, n and r are decided once; y, s, c and the machines granted (g <= n, g <= U of
the scenario) once for each, and the cost is the mean. Pure.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from nagara.pool.demandclass import replicas_by_resources
from nagara.pool.linear import LinearProgramme
from nagara.pool.problem import Offer, Problem, Scenario

Domain = tuple[str, str]  # provider, region
Accepted = tuple[tuple[int, float], ...]  # number of the demand, a


@dataclass(slots=True)
class Group:
    """Offers that can stand in for each other."""

    domain: Domain | None  # None: anywhere
    devices: int
    demands: Accepted
    offers: list[int] = field(default_factory=list)  # their numbers in the problem
    types: set[str] = field(default_factory=set)
    base: float = 0.0  # machines there will be without launches and releases

    @property
    def label(self) -> str:
        """For people."""
        place = "anywhere" if self.domain is None else f"at {' '.join(self.domain)}"
        return f"{', '.join(sorted(self.types))} {place}"


@dataclass(slots=True)
class Stage:
    """The columns and rows of one scenario."""

    shortage: list[int] = field(default_factory=list)  # column by demand
    demand_rows: list[int] = field(default_factory=list)
    capacity_rows: dict[int, int] = field(default_factory=dict)  # group number: row
    spread_rows: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """The programme and where to find things in it. Offers and groups go by number."""

    programme: LinearProgramme
    groups: list[Group]
    launch: dict[int, int] = field(default_factory=dict)  # offer: column
    release: dict[int, int] = field(default_factory=dict)
    ramp_rows: dict[str, int] = field(default_factory=dict)
    stages: list[Stage] = field(default_factory=list)


def build(problem: Problem) -> Model:
    """The programme of a problem. Always feasible: shortages have no limit."""
    programme = LinearProgramme()
    groups, spread = _groups(problem)
    model = Model(programme, groups)
    rules = problem.rules
    two_stage = bool(problem.scenarios)
    for group in model.groups:
        for number in group.offers:
            offer = problem.offers[number]
            if offer.supply > 0 and group.demands:
                # With scenarios, what is granted is paid for there.
                price = 0.0 if two_stage else offer.price_h
                model.launch[number] = programme.column(
                    price + rules.churn_cost, float(offer.supply)
                )
            if offer.idle > 0:
                worth = offer.price_h - offer.release_cost
                model.release[number] = programme.column(
                    rules.churn_cost - worth, float(offer.idle)
                )
    _add_ramps(problem, model)
    scenarios = problem.scenarios or (
        Scenario(
            tuple(demand.quantity for demand in problem.demands),
            tuple(offer.supply for offer in problem.offers),
        ),
    )
    for scenario in scenarios:
        _add_stage(problem, model, spread, scenario, 1 / len(scenarios))
    return model


def _groups(problem: Problem) -> tuple[list[Group], set[tuple[int, Domain]]]:
    """Groups, and which (demand, domain) pairs need a spread row."""
    useful = []
    could_stand: defaultdict[tuple[int, Domain], float] = defaultdict(float)
    places: defaultdict[int, set[Domain]] = defaultdict(set)
    kinds: dict[tuple[object, ...], Accepted] = {}
    for number, offer in enumerate(problem.offers):
        if offer.supply <= 0 and offer.inventory <= 0 and offer.in_flight <= 0:
            continue
        kind = (offer.type, offer.region, offer.devices, offer.resources)
        accepted = kinds.get(kind)
        if accepted is None:
            accepted = kinds[kind] = _accepted_by(problem, offer)
        if not accepted:
            if offer.idle > 0:
                useful.append((number, offer, accepted))  # of no use to anyone: may go
            continue
        useful.append((number, offer, accepted))
        domain = (offer.provider, offer.region)
        devices = offer.devices * (offer.inventory + offer.in_flight + offer.supply)
        for demand, used in accepted:
            could_stand[demand, domain] += problem.rules.utilisation * devices / used
            places[demand].add(domain)
    needed = {
        (demand, domain)
        for (demand, domain), devices in could_stand.items()
        if len(places[demand]) > 1
        and devices > problem.rules.spread * _least_quantity(problem, demand)
    }
    return _grouped(useful, needed), needed


def _grouped(
    useful: list[tuple[int, Offer, Accepted]], needed: set[tuple[int, Domain]]
) -> list[Group]:
    groups: dict[tuple[Domain | None, int, Accepted], Group] = {}
    for number, offer, accepted in useful:
        domain = (offer.provider, offer.region)
        is_looked_at = any((demand, domain) in needed for demand, _ in accepted)
        key = (domain if is_looked_at else None, offer.devices, accepted)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(*key)
        group.offers.append(number)
        group.types.add(offer.type)
        group.base += offer.inventory + offer.in_flight
    return list(groups.values())


def _least_quantity(problem: Problem, demand: int) -> float:
    quantities = [scenario.quantities[demand] for scenario in problem.scenarios]
    return min(quantities, default=problem.demands[demand].quantity)


def _accepted_by(problem: Problem, offer: Offer) -> Accepted:
    accepted = []
    for number, demand in enumerate(problem.demands):
        wanted = demand.wanted
        if wanted.accepts(offer):
            usable = wanted.devices * (offer.devices // wanted.devices)
            fitting = wanted.devices * replicas_by_resources(offer.resources, demand.needs)
            if fitting < wanted.devices:
                continue  # not even one
            # Targets of CPU, memory and disk are below all as they are.
            scarce = problem.rules.utilisation * offer.devices / fitting
            accepted.append((number, max(offer.devices / usable, scarce)))
    return tuple(accepted)


def _add_ramps(problem: Problem, model: Model) -> None:
    ramps = dict(problem.rules.ramps)
    columns: defaultdict[str, list[int]] = defaultdict(list)
    for number, column in model.launch.items():
        columns[problem.offers[number].provider].append(column)
    for provider, launches in columns.items():
        if provider in ramps:
            model.ramp_rows[provider] = model.programme.row(
                launches, [1.0] * len(launches), float(ramps[provider])
            )


def _add_stage(
    problem: Problem,
    model: Model,
    spread: set[tuple[int, Domain]],
    scenario: Scenario,
    weight: float,
) -> None:
    programme, rules = model.programme, problem.rules
    stage = Stage()
    model.stages.append(stage)
    serving: list[list[int]] = [[] for _ in problem.demands]
    in_domain: dict[tuple[int, Domain], list[int]] = {key: [] for key in sorted(spread)}
    for number, group in enumerate(model.groups):
        columns, values = [], []
        for demand, used in group.demands:
            column = programme.column(0.0)
            serving[demand].append(column)
            if group.domain is not None and (demand, group.domain) in spread:
                in_domain[demand, group.domain].append(column)
            columns.append(column)
            values.append(used)
        per_machine = rules.utilisation * group.devices
        for offer in group.offers:
            granted = _granted(problem, model, scenario, offer, weight)
            if granted is not None:
                columns.append(granted)
                values.append(-per_machine)
            if offer in model.release:
                columns.append(model.release[offer])
                values.append(per_machine)
        stage.capacity_rows[number] = programme.row(columns, values, per_machine * group.base)
    for number, wanted in enumerate(problem.demands):
        short = programme.column(weight * wanted.shortage_cost)
        stage.shortage.append(short)
        columns = [*serving[number], short]
        limit = -scenario.quantities[number]
        stage.demand_rows.append(programme.row(columns, [-1.0] * len(columns), limit))
    for (number, domain), here in in_domain.items():
        excess = programme.column(weight * rules.spread_cost)
        limit = rules.spread * scenario.quantities[number]
        row = programme.row([*here, excess], [1.0] * len(here) + [-1.0], limit)
        stage.spread_rows.append((f"{problem.demands[number].name} at {' '.join(domain)}", row))


def _granted(
    problem: Problem, model: Model, scenario: Scenario, offer: int, weight: float
) -> int | None:
    """The column of machines that come in this scenario; None where none can."""
    launched = model.launch.get(offer)
    if launched is None or not problem.scenarios:
        return launched
    if scenario.supply[offer] <= 0:
        return None
    programme = model.programme
    if scenario.supply[offer] >= problem.offers[offer].supply:
        programme.cost[launched] += weight * problem.offers[offer].price_h
        return launched
    granted = programme.column(
        weight * problem.offers[offer].price_h, float(scenario.supply[offer])
    )
    programme.row([granted, launched], [1.0, -1.0], 0.0)
    return granted
