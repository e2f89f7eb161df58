"""Images that other machines have, found through the tiers of the store. Blocking."""

import logging
import time

from nagara.base.errors import NagaraError
from nagara.image.images import KIND, Image, image_from
from nagara.store.errors import AbsentError
from nagara.store.roots import fetch_root, write_root
from nagara.store.store import Store

_ASK_S = 5.0  # a start waits so long at most

_log = logging.getLogger(__name__)


def far_image(store: Store, name: str) -> Image | None:
    """An image that a tier has, made one of this machine; its contents come when they are read."""
    if not store.transfer.tiers:
        return None
    deadline_s = time.monotonic() + _ASK_S
    try:
        root = fetch_root(store, KIND, name, deadline_s)
        for listing in root.lists:  # the collection reads them
            store.ensure(listing, deadline_s)
        write_root(store.local, root)
        return image_from(root)
    except AbsentError:
        return None
    except NagaraError as error:
        _log.warning("%s: no image from elsewhere: %s", name, error)
        return None
