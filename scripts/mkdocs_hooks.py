"""Puts the reference pages, made from the code, into the documents that mkdocs builds."""

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

from reference import PAGES


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs with the files it has found."""
    for name, make in PAGES.items():
        files.append(File.generated(config, f"reference/{name}", content=make()))
    return files
