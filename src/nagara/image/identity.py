"""Who an image's command runs as: its configuration's `User`, by the image's own tables. Pure.

    "1000"  "1000:1000"  "app"  "app:staff"

Names become numbers when the image is imported, and the numbers are kept in its configuration:
a start looks nothing up, and no link of a tree is followed on the machine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nagara.image.errors import BadArchiveError
from nagara.image.tree import Node

KEY = "identity"  # in the configuration that is kept
PASSWD, GROUP = b"etc/passwd", b"etc/group"
_ID_LIMIT = (1 << 32) - 1  # all ones means "as it was" to the kernel
_GROUPS_LIMIT = 1024
_HOME_LIMIT = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """Numbers as the kernel knows them inside the replica, and the home folder."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()  # further ones
    home: str = "/root"


ROOT = Identity()


def find_identity(user: str, passwd: bytes, group: bytes) -> Identity:
    """What `User` means.

    Args:
        passwd: the image's /etc/passwd, empty if it has none.
        group: its /etc/group.

    Raises:
        BadArchiveError: a name that is not in there.
    """
    name, _, group_name = user.partition(":")
    name = name or "0"
    number = _number(name)
    known = next((row for row in _rows(passwd, 7) if row[0] == name or row[2] == str(number)), None)
    if known is not None:
        number = _number(known[2])
    if number is None:
        raise BadArchiveError(f"its user {name!r} is not in its /etc/passwd")
    home = known[5] if known is not None and known[5].startswith("/") else "/"
    if group_name:
        return Identity(number, _group(group_name, group), (), home)
    if known is None:
        return Identity(number, 0, (), home)
    further = [_number(row[2]) for row in _rows(group, 4) if known[0] in row[3].split(",")]
    groups = sorted({each for each in further if each is not None})[:_GROUPS_LIMIT]
    return Identity(number, _number(known[3]) or 0, tuple(groups), home)


def to_config(identity: Identity) -> dict[str, Any]:
    """As the configuration keeps it."""
    return {**asdict(identity), "groups": list(identity.groups)}


def identity_in(config: Mapping[str, Any]) -> Identity:
    """The inverse of `to_config`; root where nothing is kept. Raises `BadArchiveError`."""
    kept = config.get(KEY)
    if kept is None:
        return Identity()
    try:
        found = Identity(kept["uid"], kept["gid"], tuple(kept["groups"]), kept["home"])
    except (KeyError, TypeError) as error:
        raise BadArchiveError(f"an identity that is none: {error!r}"[:200]) from error
    numbers = (found.uid, found.gid, *found.groups)
    are_numbers = all(type(each) is int and 0 <= each < _ID_LIMIT for each in numbers)
    is_home = isinstance(found.home, str) and found.home.startswith("/") and "\0" not in found.home
    if not are_numbers or not is_home or len(found.groups) > _GROUPS_LIMIT:
        raise BadArchiveError("an identity that is none")
    return found


def find_file(tree: Node, path: bytes) -> Node | None:
    """The plain file at a path; links on the way count as absent."""
    node: Node | None = tree
    for part in path.split(b"/"):
        node = node.kids.get(part) if node is not None and node.kids else None
    return node if node is not None and (node.inline or node.content) is not None else None


def _group(name: str, group: bytes) -> int:
    number = _number(name)
    known = next((row for row in _rows(group, 4) if row[0] == name), None)
    if known is not None:
        number = _number(known[2])
    if number is None:
        raise BadArchiveError(f"its group {name!r} is not in its /etc/group")
    return number


def _rows(table: bytes, fields: int) -> Iterator[list[str]]:
    for line in table.decode("utf-8", "surrogateescape").splitlines():
        row = line.split(":")
        if len(row) == fields and _number(row[2]) is not None and len(line) < _HOME_LIMIT:
            yield row


def _number(text: str) -> int | None:
    is_number = text.isascii() and text.isdigit() and len(text) <= 10
    return int(text) if is_number and int(text) < _ID_LIMIT else None
