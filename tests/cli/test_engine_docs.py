"""The engine's page knows every option of its command."""

from pathlib import Path

import click
import pytest

from nagara.cli.engine import serve

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text()
NAMES = [
    name
    for option in serve.params
    if isinstance(option, click.Option)
    for name in (*option.opts, *option.secondary_opts)
]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_on_the_page(name: str) -> None:
    assert f"`{name}`" in PAGE
