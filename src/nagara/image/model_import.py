"""A model folder as a tree: what belongs to the model and nothing of how it came here.

Links are followed, since the folder of a download cache consists of them; owners, times and
permissions are the same for everyone. So the same model gives the same index on every machine.
Blocking.
"""

import os
import stat
from pathlib import Path

from nagara.image.content_writer import ContentWriter
from nagara.image.errors import SourceError
from nagara.image.models import model_files
from nagara.image.tree import Node, check_node, new_folder


def import_model(source: Path, writer: ContentWriter) -> Node:
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
