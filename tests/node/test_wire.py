"""Messages between an agent and its callers."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nagara.contract import node as contract
from nagara.contract.control_epoch import ControlEpoch
from nagara.contract.machine import (
    CheckKind,
    HealthReport,
    MachineAgent,
    Renewal,
    RenewalAnswer,
    Vitals,
)
from nagara.contract.replica import (
    CaptureOrder,
    CaptureReport,
    NodeFacts,
    ReplicaStatus,
    StartOrder,
    StartReport,
)
from nagara.node.wire import (
    METHODS,
    decode_reply,
    decode_request,
    encode_error,
    encode_request,
    encode_result,
)

# Text as it can be in JSON: any but lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def messages(kind):
    """Any value of a message's class."""
    return st.from_type(kind)


st.register_type_strategy(str, TEXT)
st.register_type_strategy(float, FLOATS)
REQUESTS = st.one_of(
    st.tuples(st.just("facts"), st.just({})),
    st.tuples(st.just("start"), st.fixed_dictionaries({"order": messages(StartOrder)})),
    st.tuples(st.just("capture"), st.fixed_dictionaries({"order": messages(CaptureOrder)})),
    st.tuples(st.just("stop"), st.fixed_dictionaries({"replica": TEXT, "grace_s": FLOATS})),
    st.tuples(st.just("dial"), st.fixed_dictionaries({"replica": TEXT})),
    st.tuples(
        st.just("logs"), st.fixed_dictionaries({"replica": TEXT, "tail_bytes": st.integers()})
    ),
    st.tuples(st.just("forget_app"), st.fixed_dictionaries({"tenant": TEXT, "app": TEXT})),
    st.tuples(st.just("check"), st.fixed_dictionaries({"kind": st.sampled_from(CheckKind)})),
    st.tuples(st.just("vitals"), st.fixed_dictionaries({"heard": st.text()})),
    st.tuples(
        st.just("renew"),
        st.fixed_dictionaries({"renewals": st.lists(messages(Renewal), max_size=3).map(tuple)}),
    ),
    st.tuples(st.just("fence"), st.fixed_dictionaries({"slot": TEXT, "epoch": st.integers()})),
)
RESULTS = st.one_of(
    st.tuples(st.just("facts"), messages(NodeFacts)),
    st.tuples(st.just("start"), messages(StartReport)),
    st.tuples(st.just("capture"), messages(CaptureReport)),
    st.tuples(st.just("replicas"), st.lists(messages(ReplicaStatus), max_size=3).map(tuple)),
    st.tuples(st.just("exits"), messages(ReplicaStatus)),
    st.tuples(st.just("logs"), st.binary()),
    st.tuples(st.sampled_from(["stop", "dial", "forget_app", "fence"]), st.none()),
    st.tuples(st.just("check"), messages(HealthReport)),
    st.tuples(st.just("vitals"), messages(Vitals)),
    st.tuples(st.just("renew"), messages(RenewalAnswer)),
)


@given(REQUESTS, st.none() | messages(ControlEpoch))
def test_a_request_arrives_as_it_was_sent(request_, epoch):
    method, arguments = request_
    line = encode_request(method, arguments, epoch)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_request(line) == (method, arguments, epoch)


@given(RESULTS)
def test_a_result_arrives_as_it_was_sent(result):
    method, value = result
    line = encode_result(method, value)
    assert line.count(b"\n") == 1
    assert decode_reply(method, line) == value


@pytest.mark.parametrize(
    "kind",
    [
        contract.NodeError,
        contract.StartFailedError,
        contract.ReplicaGoneError,
        contract.NodeUnavailableError,
        contract.DeposedError,
    ],
)
@given(what=TEXT, where=st.none() | TEXT, hint=st.none() | TEXT)
def test_an_error_arrives_as_the_same_kind_with_all_its_parts(kind, what, where, hint):
    with pytest.raises(contract.NodeError) as caught:
        decode_reply("stop", encode_error(kind(what, where=where, hint=hint)))
    assert type(caught.value) is kind
    assert (caught.value.what, caught.value.where, caught.value.hint) == (what, where, hint)


def test_other_errors_arrive_as_a_nodes():
    with pytest.raises(contract.NodeError, match=r"^oops$"):
        decode_reply("stop", encode_error(ValueError("oops")))
    with pytest.raises(contract.NodeError, match=r"^ValueError$"):
        decode_reply("stop", encode_error(ValueError()))


def test_a_refused_connection_stays_a_connection_error():
    with pytest.raises(ConnectionError, match="nobody"):
        decode_reply("dial", encode_error(ConnectionRefusedError("nobody")))


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | TEXT,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["method", "arguments", "epoch", "replica", "order"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_what_is_no_request_is_a_value_error_whatever_it_is(line):
    try:
        method, _, _ = decode_request(line)
    except ValueError:
        return
    assert method in METHODS


def test_unknown_methods_and_arguments_are_refused():
    for plain in (
        {"method": "reboot", "arguments": {}},
        {"method": "stop", "arguments": {"replica": "r", "grace_s": 1, "more": 2}},
        {"method": "stop", "arguments": {"replica": 1, "grace_s": "x"}},
        {"method": "start", "arguments": {"order": {}}},
        {"method": "facts", "arguments": {}, "epoch": 7},
        {"method": "facts", "arguments": {}, "epoch": {"database": "one"}},
        {"arguments": {}},
        [],
    ):
        with pytest.raises(ValueError):
            decode_request(json.dumps(plain).encode())


def test_every_method_of_both_protocols_can_be_asked_for():
    methods = {*vars(contract.Node), *vars(MachineAgent)}
    assert {name for name in methods if not name.startswith("_")} == set(METHODS)


def test_messages_hold_nothing_but_plain_values():
    for kind in (StartOrder, CaptureOrder, StartReport, CaptureReport, ReplicaStatus, NodeFacts):
        assert dataclasses.is_dataclass(kind)
        assert kind.__dataclass_params__.frozen
