"""The control room's errors.

NagaraError
├── UsageError
│   ├── AppFileError     the app file: all its faults at once
│   └── UnknownAppError  no such app (or replica) is deployed
└── ControlError         the control process or its state
    ├── StateBusyError       another control process owns the state folder
    ├── StateLostError       another control process has taken the state over
    ├── NotRunningError      no control process can be reached
    └── NotAuthorisedError   the token or key is missing or wrong
"""

from nagara.base.errors import NagaraError, UsageError


class AppFileError(UsageError):
    """An app file that cannot be deployed. `problems` holds one line per fault."""

    def __init__(self, file: str, problems: tuple[str, ...]) -> None:
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        lines = "".join(f"\n  {problem}" for problem in problems)
        super().__init__(f"{count} in the app file{lines}", where=file)
        self.problems = problems


class UnknownAppError(UsageError):
    """Nothing of that name is deployed."""


class ControlError(NagaraError):
    """The control process could not do what was asked."""


class StateBusyError(ControlError):
    """Two control processes on one state folder would undo each other's work."""


class StateLostError(ControlError):
    """This process may write no longer: its lease of the state was not renewed in time."""


class NotRunningError(ControlError):
    """No control process answers."""


class NotAuthorisedError(ControlError):
    """The admin token or API key is missing or wrong."""
