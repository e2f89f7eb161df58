"""Which device here takes the place of which device of the capture. Pure.

The driver wants every device it sees in the map, each once, whether the replica used it or not.
"""

from collections.abc import Mapping, Sequence

from nagara.snapshot.device.protocol import DeviceFacts
from nagara.snapshot.errors import HostMisfitError


def device_map(
    saved: Sequence[str],
    facts: DeviceFacts,
    demand: Mapping[str, int],
    free_bytes: Mapping[str, int],
) -> dict[str, str]:
    """Device of the capture → device here; empty when they are the same.

    The devices that were used get the ones with the most free memory here, the largest first.

    Raises:
        HostMisfitError: the devices are others and the driver cannot go from one to the other,
            or there is another number of them.
    """
    if set(saved) == set(facts.uuids):
        return {}
    if not facts.can_map:
        raise HostMisfitError(
            "it was saved on another device, and this driver cannot restore to a different one",
            where=next(iter(sorted(set(saved) - set(facts.uuids))), None),
        )
    if len(saved) != len(facts.uuids):
        raise HostMisfitError(
            f"it was saved on a machine with {len(saved)} devices, this one has {len(facts.uuids)}"
        )
    order = {uuid: at for at, uuid in enumerate(saved)}
    old = sorted(saved, key=lambda uuid: (-demand.get(uuid, 0), order[uuid]))
    place = {uuid: at for at, uuid in enumerate(facts.uuids)}
    new = sorted(facts.uuids, key=lambda uuid: (-free_bytes.get(uuid, 0), place[uuid]))
    return dict(zip(old, new, strict=True))


def moved(demand: Mapping[str, int], chosen: Mapping[str, str]) -> dict[str, int]:
    """The demand by the devices of this machine."""
    return {chosen.get(uuid, uuid): size for uuid, size in demand.items()}
