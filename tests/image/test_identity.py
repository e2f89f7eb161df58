from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.image.errors import BadArchiveError
from nagara.image.identity import (
    KEY,
    ROOT,
    Identity,
    find_file,
    find_identity,
    identity_in,
    to_config,
)
from nagara.image.tree import Node, new_folder

PASSWD = b"""root:x:0:0:root:/root:/bin/sh
app:x:1000:1001:An App:/home/app:/bin/sh
other:x:1002:1002::relative:/bin/sh
broken:x:one:1::/:/bin/sh
short:x:5
caf\xc3\xa9:x:77:78::/caf\xc3\xa9:
"""
GROUP = b"root:x:0:\nstaff:x:50:app,other\naudio:x:29:app\napp:x:1001:\nbad:x:y:app\n"


@pytest.mark.parametrize(
    ("user", "identity"),
    [
        ("0", Identity(0, 0, (), "/root")),
        ("root", Identity(0, 0, (), "/root")),
        (":staff", Identity(0, 50, (), "/root")),
        ("app", Identity(1000, 1001, (29, 50), "/home/app")),
        ("1000", Identity(1000, 1001, (29, 50), "/home/app")),
        ("app:staff", Identity(1000, 50, (), "/home/app")),
        ("app:7", Identity(1000, 7, (), "/home/app")),
        ("other", Identity(1002, 1002, (50,), "/")),
        ("4000", Identity(4000, 0, (), "/")),
        ("4000:4001", Identity(4000, 4001, (), "/")),
        ("café", Identity(77, 78, (), "/café")),
    ],
)
def test_a_user_is_looked_up_in_the_images_own_tables(user: str, identity: Identity) -> None:
    assert find_identity(user, PASSWD, GROUP) == identity
    assert identity_in({KEY: to_config(identity)}) == identity


@pytest.mark.parametrize("user", ["nobody", "broken", "short", "app:none", "app:bad", "-1", "١"])
def test_a_name_that_is_not_there_is_named(user: str) -> None:
    with pytest.raises(BadArchiveError, match="is not in its /etc/"):
        find_identity(user, PASSWD, GROUP)


def test_nobody_is_named_and_root_runs_it() -> None:
    assert identity_in({}) == ROOT


@pytest.mark.parametrize("crafted", [1, "x", [], {}, {"uid": 1}])
def test_what_is_no_identity_is_refused(crafted: Any) -> None:
    with pytest.raises(BadArchiveError):
        identity_in({KEY: crafted})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("uid", -1), ("uid", 1 << 32), ("gid", True), ("gid", "0"), ("gid", (1 << 32) - 1),
        ("groups", [1, None]), ("groups", 5), ("groups", [0] * 2000),
        ("home", "relative"), ("home", None), ("home", "/a\0b"),
    ],
)  # fmt: skip
def test_a_crafted_identity_is_refused(key: str, value: Any) -> None:
    with pytest.raises(BadArchiveError):
        identity_in({KEY: {**to_config(Identity(1, 2, (3,), "/x")), key: value}})


@given(user=st.text(max_size=20), passwd=st.binary(max_size=200), group=st.binary(max_size=200))
def test_whatever_the_tables_hold_there_is_an_identity_or_an_error(
    user: str, passwd: bytes, group: bytes
) -> None:
    try:
        found = find_identity(user, PASSWD + passwd, GROUP + group)
    except BadArchiveError:
        return
    assert identity_in({KEY: to_config(found)}) == found


def test_a_table_behind_a_link_counts_as_absent() -> None:
    tree, etc = new_folder(), new_folder()
    assert tree.kids is not None
    assert etc.kids is not None
    tree.kids[b"etc"] = etc
    etc.kids[b"passwd"] = Node(0o120777, target=b"/etc/shadow")
    etc.kids[b"group"] = Node(0o100644, size=3, inline=b"x:y")
    assert find_file(tree, b"etc/passwd") is None
    assert find_file(tree, b"etc/none") is None
    assert find_file(tree, b"none/group") is None
    assert find_file(tree, b"etc/group") is etc.kids[b"group"]
