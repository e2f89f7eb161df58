"""Snapshots that other machines have made, found through the tiers of the store. Blocking.

Asked for when this machine has none that fits: one small document per app, then the description
of the one that is chosen. Its objects come while it is restored.
"""

import logging
import time

from nagara.base.errors import NagaraError
from nagara.image.shelf_tiers import adopt, far_entries
from nagara.snapshot.catalog import Catalog, far_variants
from nagara.snapshot.variant import HostFacts, NoneFits, choose

_ASK_S = 3.0  # a start waits so long at most
_QUIET_S = 30.0  # and after that tiers that could not be asked are left alone for a while

_log = logging.getLogger(__name__)


class FarSnapshots:
    """What the tiers have for this host."""

    def __init__(self, catalog: Catalog, facts: HostFacts) -> None:
        self._catalog = catalog
        self._facts = facts
        self._quiet_until_s = 0.0

    def bring(self, tenant: str, app: str, key: str) -> bool | NoneFits:
        """Makes the best fitting one that is not known here a snapshot of this machine.

        False when there is none, or nobody could be asked.
        """
        shelf = self._catalog.shelf(tenant)
        if not shelf.store.transfer.tiers or time.monotonic() < self._quiet_until_s:
            return False
        deadline_s = time.monotonic() + _ASK_S
        try:
            entries = far_entries(shelf, app, deadline_s)
            variants = {
                name: variant
                for name, variant in far_variants(entries, app, key).items()
                if not shelf.has(name) and not self._catalog.was_set_aside(tenant, name)
            }
            chosen = choose(variants, self._facts)
            if isinstance(chosen, NoneFits):
                return chosen if variants else False
            adopt(shelf, chosen, deadline_s)
        except (NagaraError, OSError) as error:
            _log.warning("%s: no snapshot from elsewhere: %s", app, error)
            self._quiet_until_s = time.monotonic() + _QUIET_S
            return False
        _log.info("%s: there is a snapshot of another machine's", app)
        return True
