"""What one machine tells of its snapshots: each with its state, sizes and needs.

Called by the node and by `nagara snapshot`. Reads the catalogue and the store's lists only.
Blocking: from a worker thread.
"""

import socket
from collections.abc import Mapping

from nagara.contract.replica import SnapshotState, SnapshotStatus
from nagara.image.shelf import Share
from nagara.snapshot.catalog import Catalog, Listed, Snapshot
from nagara.snapshot.variant import HostFacts
from nagara.store.names import parse_name


def statuses(
    catalog: Catalog, facts: HostFacts | None = None
) -> list[tuple[Listed, SnapshotStatus]]:
    """Every snapshot of this machine; with `facts`, also whether it could be restored here."""
    listed = catalog.everything()
    shares = {tenant: catalog.shelf(tenant).shares() for tenant in {one.tenant for one in listed}}
    return [(one, _status(catalog, one, shares[one.tenant], facts)) for one in listed]


def _status(
    catalog: Catalog, listed: Listed, shares: Mapping[str, Share], facts: HostFacts | None
) -> SnapshotStatus:
    snapshot, machine = listed.snapshot, socket.gethostname()
    owner = (machine, listed.tenant, listed.app, listed.name, listed.key)
    if snapshot is None:
        why = "its description cannot be read"
        return SnapshotStatus(*owner, SnapshotState.DAMAGED, reasons=(why,))
    record = snapshot.record
    failed = catalog.reasons(snapshot)
    changed = record.changed_host_file()
    here_bytes = _here_bytes(catalog, snapshot)
    reasons = [f"not carried: {note}" for note in record.notes]
    if catalog.is_quarantined(snapshot):
        state = SnapshotState.IN_QUARANTINE
        reasons += [f"failed: {line}" for line in dict.fromkeys(failed)]
    elif changed is not None:
        state = SnapshotState.STALE
    else:
        state = SnapshotState.GOOD if here_bytes is None else SnapshotState.PARTLY_HERE
    if changed is not None:
        reasons.append(f"{changed} has changed since it was made")
    share = shares.get(snapshot.image.name, Share())
    return SnapshotStatus(
        *owner,
        state,
        cpu_flags=tuple(sorted(record.variant.cpu_flags)),
        is_wide=record.variant.is_levelled,
        misfit=None if facts is None else record.variant.misfit(facts),
        memory_bytes=record.memory_bytes,
        layer_bytes=record.layer_bytes,
        stored_bytes=share.stored_bytes,
        shared_bytes=share.shared_bytes,
        here_bytes=here_bytes,
        created_at_s=record.created_at_s,
        failures=len(failed),
        reasons=tuple(reasons),
    )


def _here_bytes(catalog: Catalog, snapshot: Snapshot) -> int | None:
    """How much of it is on this machine; None: all."""
    local = catalog.shelf(snapshot.tenant).local
    listed = local.listed(str(snapshot.image.list))
    if listed is None:
        return 0
    names = [parse_name(name) for name in listed]
    here = [name for name in names if local.has(name)]
    return None if len(here) == len(names) else sum(name.size for name in here)
