"""The file daemon's process, `python -m nagara.cli.files_daemon` with these arguments:

    STORE TENANT KEEPER NAME SOCKET [INDEX]

Started by whoever mounts images (never by hand), and again when it died. It brings together what
does not know each other: the keeper that has the descriptor, the store, the file system. Without
the libraries of the command line: it shall be there in no time.

    STORE    the object folder
    TENANT   whose objects are served
    KEEPER   the keeper's socket
    NAME     under which the keeper holds the descriptor of /dev/fuse
    SOCKET   where the daemon listens for its mounter
    INDEX    of an image that is shown as a whole instead of the tenant's objects
"""

import errno
import logging
import os
import sys
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.image.images import load_lower
from nagara.image.lazy_daemon import LazyDaemon, listen_on
from nagara.image.lazy_layer import SERVED_MARK, abort_connection
from nagara.sandbox.kept_descriptors import KeptDescriptors
from nagara.store.configured import open_folder, open_store
from nagara.store.names import parse_name

_log = logging.getLogger("nagara.files_daemon")


def main() -> int:
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO
    )
    store_folder, tenant, keeper_path, name, socket_path, *index = sys.argv[1:]
    keeper = KeptDescriptors(Path(keeper_path))
    try:
        return _serve(Path(store_folder), tenant, keeper, name, Path(socket_path), index)
    except NagaraError as error:
        _log.error("%s", error)
        return error.exit_code


def _serve(
    store_folder: Path,
    tenant: str,
    keeper: KeptDescriptors,
    name: str,
    socket_path: Path,
    index: list[str],
) -> int:
    descriptor = keeper.held(name)
    if descriptor is None:
        _log.error("nobody holds %s", name)
        return 1
    mark = keeper.held(name + SERVED_MARK)
    if mark is None:
        keeper.hold(name + SERVED_MARK, descriptor)
    else:
        os.close(mark)
    folder = open_folder(store_folder)
    store = open_store(folder, tenant)
    tree = load_lower(store, parse_name(index[0])) if index else None
    daemon = LazyDaemon(store, listen_on(socket_path), tree=tree)
    try:
        daemon.run(descriptor, is_takeover=mark is not None)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _log.error(
            "this kernel (before 6.9) cannot hand over a mount: it fails and is mounted anew"
        )
        abort_connection(Path(name.removeprefix("fuse:")))
        keeper.release(name)
        keeper.release(name + SERVED_MARK)
        return 2
    finally:
        store.close()
        folder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
