"""A plan in words: for each decision the limits that decided it. Pure."""

from collections.abc import Iterable

from nagara.pool.problem import Offer, Plan, Problem

_SOURCES = {
    "optimal": "the optimum of the linear programme, rounded to whole machines",
    "greedy": "a greedy plan, because the solver gave none",
    "last": "the last plan, because the solver gave none",
    "none": "no plan: nothing was asked of the solver",
}


def explain(problem: Problem, plan: Plan) -> list[str]:
    """Sentences, most important first. Worth is money per hour and unit."""
    offers = {offer.id: offer for offer in problem.offers}
    lines = [f"This is {_SOURCES[plan.source]}{f' ({plan.note})' if plan.note else ''}."]
    lines += [_shortage(problem, plan, name, missing) for name, missing in plan.shortages]
    lines += [_launch(problem, plan, offers[name], count) for name, count in plan.launches]
    lines += [_release(offers[name], count) for name, count in plan.releases]
    lines += _prices(plan)
    if not plan.launches and not plan.releases and not plan.shortages:
        lines.append("Nothing is to be done: what is there covers every demand and its buffer.")
    return lines


def _place(offer: Offer) -> str:
    return f"{offer.type} at {offer.provider} {offer.region} ({offer.market})"


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _serves(problem: Problem, offer: Offer) -> list[str]:
    return [demand.name for demand in problem.demands if demand.wanted.accepts(offer)]


def _launch(problem: Problem, plan: Plan, offer: Offer, count: int) -> str:
    served = ", ".join(_serves(problem, offer))
    text = (
        f"Launch {_machines(count)} of {_place(offer)}: "
        f"{offer.price_h / offer.devices:.4g} per device and hour, for {served}."
    )
    if _is_bound(plan, "supply", offer.id):
        text += f" More would be taken, but no more than {offer.supply} would be granted now."
    if _is_bound(plan, "ramp", offer.provider):
        text += f" {offer.provider} takes no more launches at once."
    if any(_is_bound(plan, "spread", f"{name} at {offer.provider} {offer.region}")
           for name in _serves(problem, offer)):  # fmt: skip
        text += " No more of the demand is put into this one place."
    return text


def _release(offer: Offer, count: int) -> str:
    return (
        f"Give back {_machines(count)} of {_place(offer)}: idle, and without them every demand "
        f"and its buffer are still covered ({offer.price_h:.4g} an hour each)."
    )


def _shortage(problem: Problem, plan: Plan, name: str, missing: float) -> str:
    demand = next(demand for demand in problem.demands if demand.name == name)
    allowed = [offer for offer in problem.offers if demand.wanted.accepts(offer)]
    text = f"{name} will lack {missing:.1f} of {demand.quantity:.1f} devices: "
    if not allowed:
        return text + "no offering has an allowed type, region and size."
    if all(offer.supply == 0 for offer in allowed):
        return text + f"none of its {len(allowed)} allowed offerings grants machines at present."
    ramps = sorted({offer.provider for offer in allowed if _is_bound(plan, "ramp", offer.provider)})
    if ramps:
        return text + f"{', '.join(ramps)} takes no more launches at once."
    cheapest = min(offer.price_h / offer.devices for offer in allowed if offer.supply > 0)
    if cheapest / problem.rules.utilisation > demand.shortage_cost:
        return text + f"a device costs {cheapest:.4g} an hour, more than the shortage."
    return text + "all that its allowed offerings would grant now is taken."


def _prices(plan: Plan) -> Iterable[str]:
    for binding in plan.bindings:
        if binding.kind == "demand" and binding.worth > 0:
            yield f"One device less for {binding.subject} would save {binding.worth:.4g} an hour."


def _is_bound(plan: Plan, kind: str, subject: str) -> bool:
    return any(one.kind == kind and one.subject == subject for one in plan.bindings)
