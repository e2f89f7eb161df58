"""An `App` as a plain JSON document and back, for the state and the API. Pure."""

from dataclasses import asdict
from typing import Any

from nagara.contract.replica import Canary, HookStep, Limits, SnapshotHooks, SnapshotRules
from nagara.control.app import App, Scale, Timeouts
from nagara.control.cron import Entry


def to_document(app: App) -> dict[str, Any]:
    """Everything of `app` in values JSON knows."""
    return asdict(app)


def from_document(document: dict[str, Any]) -> App:
    """The `App` that `to_document` was given, also after a journey through JSON.

    A document of an earlier version lacks what has come since: that gets its default.
    """
    values = dict(document)
    return App(
        **{
            **values,
            "models": tuple(values["models"]),
            "command": tuple(values["command"]),
            "devices": tuple(values.get("devices", ())),  # () of an app deployed earlier
            "env": tuple((name, value) for name, value in values["env"]),
            "secrets": tuple(values.get("secrets", ())),
            "canary": Canary(**values["canary"]),
            "limits": Limits(**values["limits"]),
            "hooks": _hooks(values["hooks"]) if "hooks" in values else SnapshotHooks(),
            "rules": SnapshotRules(**values.get("rules", {})),
            "schedule": tuple(Entry(**entry) for entry in values.get("schedule", ())),
            "regions": tuple(values.get("regions", ())),
            "scale": Scale(**values["scale"]),
            "timeouts": Timeouts(**values["timeouts"]),
        }
    )


def _hooks(values: dict[str, Any]) -> SnapshotHooks:
    steps = {
        when: tuple(
            HookStep(**{**step, "command": tuple(step["command"])}) for step in values[when]
        )
        for when in ("before", "after")
    }
    return SnapshotHooks(
        steps["before"],
        steps["after"],
        values["in_python"],
        values.get("rebuilds_communicators", False),  # of an app deployed earlier
    )
