"""What an image's configuration says about running it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nagara.contract.node import NodeError
from nagara.contract.replica import ReplicaSpec
from nagara.image.identity import ROOT, Identity, identity_in
from nagara.image.images import Image

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How a command is run in a tree; the app's own settings go before these.

    `command` is what runs when the app names none: entry point and command of the image.
    """

    env: Mapping[str, str]
    folder: str = "/"  # that the command begins in
    command: tuple[str, ...] = ()
    identity: Identity = ROOT

    def command_of(self, spec: ReplicaSpec) -> tuple[str, ...]:
        """What runs for an app. Raises `NodeError` when nobody says it."""
        if command := spec.command or self.command:
            return command
        raise NodeError(
            "neither the app nor its image names a command", where=spec.app,
            hint="give the app a command",
        )  # fmt: skip

    def fingerprint(self) -> list[Any]:
        """Equal for equal settings; part of a snapshot's key."""
        who = self.identity
        numbers = [who.uid, who.gid, *who.groups, who.home]
        return [sorted(self.env.items()), self.folder, self.command, numbers]


def run_settings(image: Image) -> RunSettings:
    """Of an image. Raises `BadArchiveError` for an identity that is none."""
    config = image.config or {}
    env = {"PATH": SYSTEM_PATH}
    for entry in _texts(config.get("Env")):
        name, _, value = entry.partition("=")
        env[name] = value
    folder = str(config.get("WorkingDir") or "/")
    command = (*_texts(config.get("Entrypoint")), *_texts(config.get("Cmd")))
    return RunSettings(
        env, folder if folder.startswith("/") else f"/{folder}", command, identity_in(config)
    )


def _texts(found: Any) -> tuple[str, ...]:
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return tuple(found) if is_list else ()
