import errno
import stat
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nagara.image import fuse_wire as wire
from nagara.image.object_files import ObjectFiles, node_of
from nagara.store.names import ObjectName, name_bytes
from nagara.store.store import Store


def request(operation: int, body: bytes = b"", node: int = 1, unique: int = 7) -> bytes:
    head = struct.pack("<IIQQIIIHH", 40 + len(body), operation, unique, node, 0, 0, 99, 0, 0)
    return head + body


def outcome(answer: object) -> int:
    """The errno in an answer; 0 for success."""
    assert isinstance(answer, bytes | memoryview)
    length, number, unique = struct.unpack_from("<IiQ", answer)
    assert (length, unique) == (len(answer), 7)
    return -number


def test_a_name_is_looked_up_without_asking_anybody(store: Store) -> None:
    files = ObjectFiles(store, tuple)
    name = name_bytes(b"x" * 5000)
    answer = files.handle(wire.parse_request(request(wire.LOOKUP, str(name).encode() + b"\0")), 0)
    assert outcome(answer) == 0
    assert isinstance(answer, bytes)
    (node,) = struct.unpack_from("<Q", answer, 16)
    attributes = struct.unpack_from("<QQQQQQIIII", answer, 16 + 40)
    assert (node, attributes[1], attributes[9]) == (node_of(name), 5000, stat.S_IFREG | 0o444)
    for other in (b"x", b"../x", str(name).encode() + b"0", b"\xff"):
        raw = request(wire.LOOKUP, other + b"\0")
        # The same digest with another size would have the same node id: one of them is a lie.
        expected = errno.EIO if other.startswith(str(name).encode()) else errno.ENOENT
        assert outcome(files.handle(wire.parse_request(raw), 0)) == expected


def test_a_node_of_a_previous_daemon_is_found_in_the_mounted_lists(store: Store) -> None:
    name = store.put_bytes(b"content" * 1000)
    files = ObjectFiles(store, lambda: [name])
    raw = request(wire.READ, struct.pack("<QQI", 0, 7, 100), node=node_of(name))
    later = files.handle(wire.parse_request(raw), 0)
    assert callable(later)
    answer = later(time.monotonic() + 10)
    assert bytes(answer)[16:] == (b"content" * 1000)[7:107]
    raw = request(wire.READ, struct.pack("<QQI", 0, 6990, 100), node=node_of(name))
    assert bytes(files.handle(wire.parse_request(raw), 0))[16:] == (b"content" * 1000)[6990:]  # type: ignore[arg-type]
    with pytest.raises(OSError, match="nobody knows"):
        files.handle(wire.parse_request(request(wire.OPEN, bytes(8), node=12345)), 0)


@given(st.binary(min_size=32, max_size=32), st.integers(0, 1 << 40))
def test_node_ids_are_a_function_of_the_name_and_never_reserved(digest: bytes, size: int) -> None:
    assert 1 < node_of(ObjectName(digest, size)) < 1 << 63


@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 60), st.binary(max_size=80), st.integers(0, 1 << 63))
def test_any_request_is_answered_or_refused_and_nothing_else(
    operation: int, body: bytes, node: int
) -> None:
    files = ObjectFiles(_NoStore(), tuple)  # type: ignore[arg-type]
    try:
        parsed = wire.parse_request(request(operation, body, node))
        if operation == wire.INIT:
            answer: object = wire.init_answer(parsed)
        else:
            answer = files.handle(parsed, 0)
    except (wire.WireError, OSError):
        return
    assert answer is None or callable(answer) or outcome(answer) >= 0


@given(st.binary(max_size=100))
def test_bytes_that_are_no_request_are_refused(raw: bytes) -> None:
    try:
        wire.parse_request(raw)
    except wire.WireError:
        return
    assert len(raw) >= 40


def test_every_answer_has_the_size_the_kernel_expects() -> None:
    init = wire.parse_request(
        request(wire.INIT, struct.pack("<IIII", 7, 41, 1 << 17, (1 << 32) - 1))
    )
    found = wire.Attributes(5, 0o100644, 10)
    sizes = {
        "init": (wire.init_answer(init), 64), "entry": (wire.entry(7, found), 128),
        "attributes": (wire.attributes(7, found), 104), "open": (wire.opened(7), 16),
        "statfs": (wire.statfs(7, 1, 1), 80), "xattr": (wire.xattr_size(7, 1), 8),
    }  # fmt: skip
    assert {name: len(answer) - 16 for name, (answer, _) in sizes.items()} == {
        name: size for name, (_, size) in sizes.items()
    }


class _NoStore:
    """Nothing is asked of it by what is only looked up."""

    class local:  # noqa: N801
        @staticmethod
        def has(_: object) -> bool:
            return False

    @staticmethod
    def open_here(_: object) -> None:
        return None
