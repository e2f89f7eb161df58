"""The planner's question out of what the pool sees: machines, prices, supply, measured demand.

Pure: it reads the core and changes nothing but the meters it is given.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from nagara.contract.machine import Offering
from nagara.pool.buffer import reserve
from nagara.pool.core import PoolCore
from nagara.pool.demandclass import DemandClass
from nagara.pool.machines import Machine
from nagara.pool.meters import Meters
from nagara.pool.problem import Demand, Offer, Problem, Rules, Scenario
from nagara.pool.scenarios import sample
from nagara.pool.states import IN_FLIGHT, MachineState

PLAN_EVERY_S = 60.0
_CERTAIN = 0.95  # a chance from which on an order is as good as a machine
_LEAST_SAFETY = 0.5  # of the buffer beyond the mean; kept whatever is expected to come back
_UNPROVEN = 2  # machines on their way from an offering that has not brought one up lately
_SILENT_S = 60.0  # a machine that has said nothing for so long lends nothing: it is made up for
_LATE = 2.0  # times the typical lead: such a machine is no longer counted on


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of the pool decides."""

    service: float = 0.99  # share of refills through which the reserve shall hold
    utilisation: float = 0.8  # highest planned share of devices in use, 0.65 to 0.80
    spread: float = 0.4  # share of a demand in one failure domain at no extra cost
    spare_machines: int = 1  # beside the buffer, for each type in use
    ramps: tuple[tuple[str, int], ...] = ()
    least_free: int = 0  # slots free at any time, whatever was measured
    scenarios: int = 10  # futures to plan for where supply is uncertain; 0: the expected one only


@dataclass(slots=True)
class _Joint:
    """Classes that accept the same offerings: one buffer for all of them."""

    wanted: DemandClass
    held: float = 0.0
    arrivals: float = 0.0
    returns: float = 0.0
    spread: float = 0.0  # Σ dispersion × arrivals: independent classes' variances add up


def make_problem(
    core: PoolCore,
    offerings: Iterable[Offering],
    meters: Meters,
    policy: Policy,
    now_s: float,
) -> Problem:
    """What to ask the planner now."""
    offers = _offers(core, offerings, now_s)
    if not offers:
        return Problem((), ())
    holding = _holding(offers)
    refill_s = core.leads.refill_s() + PLAN_EVERY_S
    joint = _joint(core, offers, meters, refill_s, now_s)
    demands = _demands(core, offers, joint, policy)
    rules = Rules(
        utilisation=policy.utilisation,
        spread=policy.spread,
        spread_cost=0.1 * holding,
        churn_cost=0.02 * holding,
        ramps=policy.ramps,
    )
    return Problem(offers, demands, rules, _futures(core, offers, joint, demands, policy, now_s))


def _futures(
    core: PoolCore,
    offers: tuple[Offer, ...],
    joint: list[_Joint],
    demands: tuple[Demand, ...],
    policy: Policy,
    now_s: float,
) -> tuple[Scenario, ...]:
    """Scenarios where orders may well come to nothing; none where they are as good as machines."""
    supply = [(offer.supply, core.supply.chance(offer.id, now_s)) for offer in offers]
    if not policy.scenarios or all(chance >= _CERTAIN for count, chance in supply if count):
        return ()
    quantities = [partial(_quantity, one, policy) for one in joint]
    spares = [partial(_always, demand.quantity) for demand in demands[len(joint) :]]
    return sample((*quantities, *spares), supply, policy.service, policy.scenarios)


def _always(quantity: float, service: float) -> float:
    return quantity


def _offers(core: PoolCore, offerings: Iterable[Offering], now_s: float) -> tuple[Offer, ...]:
    machines: defaultdict[str, list[Machine]] = defaultdict(list)
    known = {offering.id: offering for offering in offerings}
    for machine in core.table:
        machines[machine.offering.id].append(machine)
        known.setdefault(machine.offering.id, machine.offering)
    refill_s = core.leads.refill_s()
    return tuple(
        _offer(core, offering, machines[offering.id], refill_s, now_s)
        for offering in known.values()
    )


def _offer(
    core: PoolCore, offering: Offering, machines: list[Machine], refill_s: float, now_s: float
) -> Offer:
    ready = coming = late = waiting = 0
    for machine in machines:
        if machine.state is MachineState.READY:
            is_silent = machine.is_silent and now_s > machine.heard_s + _SILENT_S
            ready += not (machine.is_kept_out or is_silent)
        elif machine.state in IN_FLIGHT:
            is_late = now_s > machine.requested_s + _LATE * max(
                core.leads.typical_s(offering.id), 60.0
            )
            late += is_late
            coming += not is_late
            waiting += machine.state is MachineState.REQUESTED
    supply = core.supply.usable(offering, now_s) - waiting
    if late and late >= ready:
        supply = 0  # what was granted there does not come
    elif not ready and not core.supply.is_proven(offering.id, now_s):
        supply = min(supply, _UNPROVEN - coming - late)  # a grant alone proves nothing
    return Offer(
        id=offering.id,
        provider=offering.provider,
        region=offering.region,
        type=offering.type,
        devices=offering.devices,
        price_h=core.supply.effective_price_h(offering, refill_s, now_s),
        market=offering.market,
        inventory=ready,
        in_flight=coming * core.supply.boot_success(offering.id, now_s),
        idle=sum(not one.is_own for one in core.grants.inventory.idle(offering.id)),
        supply=max(0, supply),
        resources=offering.resources,
    )


def _joint(
    core: PoolCore, offers: tuple[Offer, ...], meters: Meters, refill_s: float, now_s: float
) -> list[_Joint]:
    """What is measured of each set of classes that can take each other's slots."""
    joint: dict[tuple[int, frozenset[str]], _Joint] = {}
    for wanted, meter in meters.all(now_s):
        accepted = frozenset(offer.id for offer in offers if wanted.accepts(offer))
        together = joint.setdefault((wanted.devices, accepted), _Joint(wanted))
        arrivals = meters.expected(wanted, meter, refill_s, now_s)
        together.arrivals += arrivals
        held = core.grants.held_devices.get(wanted, 0)
        together.returns += held * meters.share_returned(wanted, held, now_s) * refill_s / 60
        together.spread += meter.dispersion * arrivals
        together.held += held
    return list(joint.values())


def _demands(
    core: PoolCore, offers: tuple[Offer, ...], joint: list[_Joint], policy: Policy
) -> tuple[Demand, ...]:
    demands = [
        Demand(
            name=label(one.wanted),
            wanted=one.wanted,
            quantity=_quantity(one, policy, policy.service),
            shortage_cost=_shortage(policy, [o for o in offers if one.wanted.accepts(o)]),
            needs=core.grants.mean_needs(one.wanted),
        )
        for one in joint
    ]
    return (*demands, *_spares(offers, policy))


def _holding(offers: Iterable[Offer]) -> float:
    """What a spare device costs per hour; a machine that is there for nothing is no measure."""
    prices = [offer.price_h / offer.devices for offer in offers if offer.price_h > 0]
    return min(prices, default=1.0)


def _shortage(policy: Policy, accepted: Iterable[Offer]) -> float:
    """What a missing device must cost so that holding for the policy's service is the optimum."""
    return _holding(accepted) * policy.service / (1 - policy.service)


def _quantity(one: _Joint, policy: Policy, service: float) -> float:
    """Devices to plan for, so that capacity below 100 % and the reserve hold, not one on the other.

    The programme divides by the utilisation: what comes out is `held` over it, or `held` and the
    buffer, whichever is more.
    """
    return max(one.held, policy.utilisation * (one.held + _buffer(one, policy, service)))


def _buffer(one: _Joint, policy: Policy, service: float) -> float:
    """The quantile of what one refill period takes, less what it gives back on average.

    Where replicas live for hours nothing comes back in time and the whole quantile is held.
    """
    least = float(policy.least_free)
    if one.arrivals <= 0:
        return least
    taken = reserve(one.arrivals, one.spread / one.arrivals, service)
    safety = taken - one.arrivals
    return max(least, _LEAST_SAFETY * safety, taken - one.returns)


def _spares(offers: tuple[Offer, ...], policy: Policy) -> Iterable[Demand]:
    """A machine that fails takes slots with it: spares are kept beside the buffer."""
    if policy.spare_machines:
        in_use = {offer.type for offer in offers if offer.inventory}
        for type_ in sorted(in_use):
            of_type = [offer for offer in offers if offer.type == type_]
            devices = max(offer.devices for offer in of_type)
            yield Demand(
                name=f"spare {type_}",
                wanted=DemandClass(frozenset({type_})),
                quantity=float(policy.spare_machines * devices),
                shortage_cost=_shortage(policy, of_type) / 2,
            )


def label(wanted: DemandClass) -> str:
    """A class of claims, for people."""
    types = "any device" if wanted.types is None else " or ".join(sorted(wanted.types))
    count = "" if wanted.devices == 1 else f"{wanted.devices} x "
    place = f" in {', '.join(wanted.regions)}" if wanted.regions else ""
    return f"{count}{types}{place}"
