"""What a start read of its files, in objects and bytes. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from nagara.contract.replica import FilesReport, TierRead
from nagara.image.recorder import Touch, touched_bytes


def with_recorded(report: FilesReport, recorded: Sequence[Touch]) -> FilesReport:
    """Where nobody counts what is read: what recorded starts have read."""
    if not recorded:
        return report
    objects = len({name for name, _ in recorded})
    return replace(
        report, recorded_objects=objects, recorded_bytes=sum(map(touched_bytes, recorded))
    )


def difference(before: tuple[TierRead, ...], after: tuple[TierRead, ...]) -> tuple[TierRead, ...]:
    """What came from each tier between two counts."""
    earlier = {each.tier: each for each in before}
    none = TierRead("", 0, 0)
    changes = (
        TierRead(
            each.tier,
            each.objects - earlier.get(each.tier, none).objects,
            each.size_bytes - earlier.get(each.tier, none).size_bytes,
        )
        for each in after
    )
    return tuple(each for each in changes if each.objects > 0)
