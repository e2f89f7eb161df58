"""Whether an order is one that a node carries out: names that are safe as folders, known kinds.

Names become paths of this machine, and whoever orders may have less rights than the node.
"""

import re

from nagara.contract.node import NodeError
from nagara.contract.replica import CaptureOrder, ImageOrder, StartOrder

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_IMAGES = ("host", "dir:", "venv:", "oci:", "docker-archive:", "registry:", "image:")
_WITH_COMMANDS = _IMAGES[3:]
_INDEX = re.compile(r"[a-z2-7.0-9]{1,100}")


def check_order(order: StartOrder | CaptureOrder) -> None:
    """Raises `NodeError` for an order that must not be carried out."""
    spec = order.spec
    names = {"replica": order.replica, "tenant": spec.tenant, "app": spec.app}
    for kind, name in (*names.items(), *(("model", model.name) for model in spec.models)):
        check_name(kind, name)
    check_image(spec.image, spec.app)
    if spec.image != "host" and not _INDEX.fullmatch(spec.image_index or ""):
        raise NodeError("the image's index is not named", where=spec.app, hint="deploy it again")
    if not spec.command and not may_name_command(spec.image):
        raise NodeError("the command is empty", where=spec.app)
    if not 0 < spec.port < 65536:
        raise NodeError(f"{spec.port} is not a port", where=spec.app)
    if not spec.ready_path.startswith("/") or not spec.canary.path.startswith("/"):
        raise NodeError("paths begin with a slash", where=spec.app)
    if spec.network not in ("none", "egress"):
        raise NodeError(f"unknown network {spec.network!r}", where=spec.app)
    for name, _ in spec.secrets:
        check_name("secret", name)
    pairs = (*spec.env, *spec.secrets)
    texts = (*spec.command, *(part for pair in pairs for part in pair))
    if any("\0" in text for text in texts):
        raise NodeError("the command or environment contains a zero byte", where=spec.app)


def may_name_command(image: str) -> bool:
    """What such a source brings can say itself what runs in it."""
    return image.startswith(_WITH_COMMANDS)


def check_image(image: str, app: str) -> None:
    """Raises `NodeError` for a source of no known kind."""
    if image != "host" and not image.startswith(_IMAGES[1:]):
        known = ", ".join(_IMAGES)
        raise NodeError(f"unknown image {image!r}", where=app, hint=f"known: {known}")


def check_image_order(order: ImageOrder) -> None:
    """Raises `NodeError` for an order that must not be carried out."""
    check_name("tenant", order.tenant)
    check_name("app", order.app)
    for model in order.models:
        check_name("model", model.name)
    check_image(order.image, order.app)


def check_name(kind: str, name: str) -> None:
    """Raises `NodeError` for a name that is no single, plain path component."""
    if not _NAME.fullmatch(name):
        raise NodeError(
            f"{name[:80]!r} is not a name of a {kind}",
            hint="letters, digits, `.`, `_`, `-`; at most 63, the first a letter or digit",
        )
