"""The store of a machine and the image mounts over it, with a keeper behind them. Blocking."""

import sys
from pathlib import Path

from nagara.image.mounting import ImageMounts, Method
from nagara.image.probing import probe
from nagara.sandbox.kept_descriptors import KeptDescriptors
from nagara.store.configured import open_folder, open_store

FILE_DAEMON = "nagara.cli.files_daemon"


def open_image_mounts(
    state: Path, *, supervise: bool = False, method: Method | None = None
) -> ImageMounts:
    """The store of a machine and the mounts over it, as probing finds them possible."""
    objects = open_folder(state / "store")
    keeper = state / "node/keeper.sock"
    return ImageMounts(
        state / "files",
        objects,
        lambda tenant: open_store(objects, tenant),
        KeptDescriptors(keeper),
        lambda tenant: daemon_command(objects.path, tenant, keeper),
        method=method or probe(state / "files").method(),
        supervise=supervise,
    )


def daemon_command(store: Path, tenant: str, keeper: Path) -> tuple[str, ...]:
    """What starts a file daemon; the mounter appends two more words."""
    return (sys.executable, "-P", "-m", FILE_DAEMON, str(store), tenant, str(keeper))
