"""Model folders as trees, and as images that show them at their stable place, `/models/NAME`.

A folder from elsewhere: what belongs to the model and nothing of how it came here. Links are
followed, since the folder of a download cache consists of them; owners, times and permissions are
the same for everyone. So the same model gives the same index on every machine.

A model of this machine: its folder as it is. Stacked on an app's image it is one more read-only
layer: the weights are mapped from the local object, whose pages in the kernel's cache all replicas
share. Blocking.
"""

import os
import stat
from pathlib import Path

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError
from nagara.image.folder_import import import_folder
from nagara.image.images import Added, add_image
from nagara.image.models import model_files
from nagara.image.prefetch import check_complete
from nagara.image.tree import Node, check_node, new_folder
from nagara.store.roots import read_list
from nagara.store.store import Store

MODELS = b"models"


def import_model(store: Store, folder: Path, model: str, writer: ContentWriter, name: str) -> Added:
    """Brings the model in `folder` into the store as the image `name`.

    Raises:
        ImageError: its folder cannot be read.
    """
    with writer:
        tree = import_folder(folder, writer)
    root, models = new_folder(), new_folder()
    assert root.kids is not None
    assert models.kids is not None
    root.kids[MODELS] = models
    models.kids[model.encode()] = tree
    added = add_image(store, name, root, f"model:{model}", new=writer.new)
    image = added.image
    check_complete(store, image.list, [*read_list(store, image.list), image.list])
    return added


def read_model(source: Path, writer: ContentWriter) -> Node:
    """The tree of the model in a folder.

    Raises:
        ModelError: something in it is no readable file; names it.
        SourceError: it is no folder, or has no files.
    """
    if not source.is_dir():
        raise SourceError("is no folder", where=str(source))
    root = new_folder()
    for path in model_files(source):
        parts = [os.fsencode(part) for part in path.relative_to(source).parts]
        here = root
        for part in parts[:-1]:
            assert here.kids is not None
            here = here.kids.setdefault(part, new_folder())
        node = Node(stat.S_IFREG | 0o644, size=path.stat().st_size)
        check_node(node, b"/".join(parts))
        assert here.kids is not None
        here.kids[parts[-1]] = node
        writer.add_path(node, os.fsencode(path.resolve()))
    if not root.kids:
        raise SourceError("has no files of a model", where=str(source))
    return root
