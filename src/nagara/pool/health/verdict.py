"""What follows from a round of checks. A check that did not run is no pass. Pure."""

from nagara.contract.machine import HealthReport, Outcome


def failure(report: HealthReport, required: frozenset[str]) -> str | None:
    """Why the machine must not be used, or None.

    `required` are the checks without which nothing is known of the machine; others may be
    missing where the machine lacks what they need.
    """
    ran = {result.name: result for result in report.results}
    for result in report.results:
        if result.outcome is Outcome.FAIL:
            return f"{result.name}: {result.detail or 'failed'}"
    for name in sorted(required):
        one = ran.get(name)
        if one is None or one.outcome is not Outcome.PASS:
            why = one.detail if one is not None and one.detail else "no result"
            return f"{name} did not run: {why}"
    return None
