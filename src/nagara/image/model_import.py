"""A model folder as an image that shows it at its stable place, `/models/NAME`.

Stacked on an app's image it is one more read-only layer: the weights are mapped from the local
object, whose pages in the kernel's cache all replicas share. Blocking.
"""

from pathlib import Path

from nagara.image.content_writer import ContentWriter
from nagara.image.folder_import import import_folder
from nagara.image.images import Added, add_image
from nagara.image.prefetch import check_complete
from nagara.image.tree import new_folder
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
