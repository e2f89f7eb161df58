"""Where nagara keeps its state, and how much it says: decided once, by the root command.

Every sub-command receives it as `ctx.obj` (`@click.pass_obj`). It creates no folder: who writes
there does.
"""

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import NagaraError
from nagara.control.state_folder import default_state

_REFUSALS = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)


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


def unwritable(error: OSError, settings: Settings) -> NagaraError | None:
    """The system's refusal to write to the state folder in words; None for another error."""
    if error.errno not in _REFUSALS or not error.filename:
        return None
    path = Path(os.fsdecode(error.filename))
    if not path.is_relative_to(settings.state) and not settings.state.is_relative_to(path):
        return None
    return NagaraError(
        f"nagara's state cannot be written: {os.strerror(error.errno)}",
        where=str(path),
        hint="make room or give it to the user who runs nagara; --state DIR names another folder",
    )


def read_settings(state: Path | None, *, verbose: bool) -> Settings:
    """The settings of this process. `state` None means the default of the current user."""
    chosen = default_state(os.environ, os.geteuid()) if state is None else state
    return Settings(state=chosen.expanduser().absolute(), verbose=verbose)
