"""By what right this process calls agents: the epoch under which it holds its control database.

Calls are prepared before anybody knows that; whoever comes to know it sets it here.
"""

from collections.abc import Callable

from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.node import DeposedError

Asked = Callable[[], ControlEpoch | None]
Told = Callable[[DeposedError], None]


class Mandate:
    """One process's, for all its calls.

    Attributes:
        epoch: asked before each call; None: this is no control process (yet), and may only look.
            Raises `NodeUnavailableError` when the call must not be made.
        on_refused: is told that a newer control process gives the orders; may be told again.
    """

    def __init__(self) -> None:
        self.epoch: Asked = lambda: None
        self.on_refused: Told = lambda _: None
