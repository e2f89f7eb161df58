"""How commands say what they found: as text for people, or with `--json` for programs."""

import json
from typing import Any

import click

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON on standard output and nothing else there."
)


def printable(text: str) -> str:
    """Text of others for a terminal: control characters are shown, not obeyed."""
    return "".join(_PICTURES.get(character, character) for character in text)


_PICTURES = {
    **{chr(code): chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    **{chr(code): f"\\x{code:02x}" for code in range(0x7F, 0xA0)},
}


def tell(document: Any, *lines: str, as_json: bool) -> None:
    """The document, or the lines that say the same."""
    if as_json:
        click.echo(json.dumps(document, indent=2))
        return
    for line in lines:
        click.echo(line)
