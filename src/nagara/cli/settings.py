"""Where nagara keeps its state, and how much it says: decided once, by the root command.

Every sub-command receives it as `ctx.obj` (`@click.pass_obj`). It creates no folder: who writes
there does.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """What all sub-commands share. `state` is absolute."""

    state: Path
    verbose: bool = False

    @property
    def models_dir(self) -> Path:
        """One folder per model."""
        return self.state / "models"

    @property
    def tools_dir(self) -> Path:
        """Programs that `nagara setup` put there because the machine's own did not do."""
        return self.state / "tools"

    def make_state(self) -> None:
        """Makes the folder where it is missing. Raises `UsageError` where that cannot be."""
        try:
            self.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the state folder cannot be made: {error.strerror}",
                where=str(self.state),
                hint="name another with --state or NAGARA_STATE",
            ) from error


def default_state(environ: Mapping[str, str], user_id: int) -> Path:
    """`/var/lib/nagara` for root, else `$XDG_STATE_HOME/nagara`, else `~/.local/state/nagara`.

    A relative `XDG_STATE_HOME` is passed over, as its specification demands.
    """
    if user_id == 0:
        return Path("/var/lib/nagara")
    base = Path(environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local/state") / "nagara"


def read_settings(state: Path | None, *, verbose: bool) -> Settings:
    """The settings of this process. `state` None means the default of the current user."""
    chosen = default_state(os.environ, os.geteuid()) if state is None else state
    return Settings(state=chosen.expanduser().absolute(), verbose=verbose)
