"""What is kept of a start, made from what its parts told. Pure."""

from dataclasses import asdict

from nagara.base.spans import Waterfall, with_unaccounted
from nagara.contract.replica import StartReport
from nagara.control.replicas import Replica
from nagara.control.state import StartRecord


def succeeded(
    replica: Replica, report: StartReport, waterfall: Waterfall, total_s: float, started_s: float
) -> StartRecord:
    """A start after which the replica served. Seconds; `started_s` by the wall's clock."""
    return StartRecord(
        replica=replica.name,
        tenant=replica.app.tenant,
        app=replica.app.name,
        kind=report.kind,
        stages=with_unaccounted(waterfall.stages(), total_s),
        total_s=total_s,
        started_s=started_s,
        fallback=report.fallback,
        snapshot=report.snapshot,
        failed_snapshot=report.failed_snapshot,
        files=None if report.files is None else asdict(report.files),
        host=report.host,
    )


def failed(
    replica: Replica, reason: str, waterfall: Waterfall, total_s: float, started_s: float
) -> StartRecord:
    """A start that came to nothing."""
    return StartRecord(
        replica=replica.name,
        tenant=replica.app.tenant,
        app=replica.app.name,
        kind=None,
        stages=with_unaccounted(waterfall.stages(), total_s),
        total_s=total_s,
        started_s=started_s,
        error=reason,
    )
