"""What a command's exit code means. One table, for the root command, its help and its tests.

An error's own `exit_code` tells wrong requests (2) from the rest (1); what a script may want to
do differently is told apart here, by the error's kind.
"""

from nagara.base.errors import NagaraError, UsageError
from nagara.contract.node import NodeUnavailableError
from nagara.control.errors import NotAuthorisedError, NotRunningError, StateBusyError

INTERRUPTED = 130

EXIT_CODES: dict[int, str] = {
    0: "it worked",
    1: "it failed; or what was looked for is there (`doctor --leaks`, `verify`, `pool diagnose`)",
    2: "the request was wrong: an unknown name, key or option, a bad value, a bad app file",
    3: "nagara, or a machine's agent, is not running or does not answer",
    4: "this user or token may not",
    5: "another process uses the state folder",
    INTERRUPTED: "interrupted with Ctrl-C",
}

_KINDS: tuple[tuple[type[NagaraError], int], ...] = (
    (UsageError, 2),
    (NotRunningError, 3),
    (NodeUnavailableError, 3),
    (NotAuthorisedError, 4),
    (StateBusyError, 5),
)


def exit_code_of(error: NagaraError) -> int:
    """The exit code of a command that ends with this error."""
    return exit_code_of_kind(type(error))


def exit_code_of_kind(kind: type[NagaraError]) -> int:
    """The exit code for errors of a kind."""
    for known, code in _KINDS:
        if issubclass(kind, known):
            return code
    return kind.exit_code
