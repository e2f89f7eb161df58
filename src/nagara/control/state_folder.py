"""Where nagara's state is when nobody says. Small: every command imports it."""

from collections.abc import Mapping
from pathlib import Path


def default_state(environ: Mapping[str, str], user_id: int) -> Path:
    """`/var/lib/nagara` for root, else `$XDG_STATE_HOME/nagara`, else `~/.local/state/nagara`.

    A relative `XDG_STATE_HOME` is passed over, as its specification demands.
    """
    if user_id == 0:
        return Path("/var/lib/nagara")
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local/state") / "nagara"
