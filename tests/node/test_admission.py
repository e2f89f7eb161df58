"""Orders that are not carried out: names that are no names, unknown kinds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.contract.node import NodeError
from nagara.contract.replica import Canary, Lease, ModelMount, ReplicaSpec, StartOrder
from nagara.node.admission import check_name, check_order

SPEC = ReplicaSpec(
    tenant="default",
    app="app",
    definition="d",
    image="host",
    command=("serve",),
    port=8000,
    ready_path="/",
    canary=Canary("/"),
    models=(ModelMount("m", "d"),),
)


def order(replica="r1", **changes) -> StartOrder:
    return StartOrder(replica, Lease("s", 1), replace(SPEC, **changes))


def test_an_ordinary_order_is_carried_out():
    check_order(order())


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "/etc", "../x", "-r", ".lock", "a\nb", "x" * 64, "ü", "a b", "a\0"],
)
def test_a_name_that_is_no_plain_component_is_refused_wherever_it_stands(name):
    for bad in (
        order(replica=name),
        order(tenant=name),
        order(app=name),
        order(models=(ModelMount(name, "d"),)),
    ):
        with pytest.raises(NodeError, match="is not a name"):
            check_order(bad)


@given(st.text())
def test_no_accepted_name_leads_out_of_a_folder(name):
    try:
        check_name("replica", name)
    except NodeError:
        return
    assert "/" not in name
    assert name not in ("", ".", "..")
    assert not name.startswith((".", "-"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"image": "ext4:debian"}, "unknown image"),
        ({"image": "oci:debian"}, "index is not named"),
        ({"image": "oci:debian", "image_index": "../x"}, "index is not named"),
        ({"command": ()}, "command is empty"),
        ({"port": 0}, "not a port"),
        ({"port": 65536}, "not a port"),
        ({"ready_path": "health"}, "slash"),
        ({"canary": Canary("x")}, "slash"),
        ({"command": ("a\0b",)}, "zero byte"),
        ({"env": (("A", "\0"),)}, "zero byte"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(changes, words):
    with pytest.raises(NodeError, match=words):
        check_order(order(**changes))
