"""nagara runs AI inference servers so that an expensive device never waits.

Importing the package loads nothing else: no torch, no web server.
"""

from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "App": "nagara.control.app_handle",
    "NagaraError": "nagara.base.errors",
    **dict.fromkeys(
        ("AppFileError", "NotAuthorisedError", "NotRunningError", "UnknownAppError"),
        "nagara.control.errors",
    ),
}


def __getattr__(name: str) -> Any:
    """What the package offers is loaded when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nagara' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
