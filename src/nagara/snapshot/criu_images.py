"""The checkpoint tool's image files, as far as nagara reads and rewrites them. Pure codecs.

    magic (4 bytes) · magic of the kind (4 bytes) · { size (u32, little endian) · message }*

Messages (protobuf) are taken apart into numbered fields only; what is not understood is written
back as it was. Format: CRIU's `images/*.proto` and its documentation of image files.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_COMMON_MAGIC = 0x54564319
_HEAD_BYTES = 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class ImageFormatError(ValueError):
    """Not an image file of the tool, or a damaged one."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: `value` is an int for a varint, else the field's bytes."""

    number: int
    kind: int
    value: int | bytes


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The head of an image file and its messages in order."""

    head: bytes
    messages: tuple[bytes, ...]

    @classmethod
    def parse(cls, content: bytes) -> "ImageFile":
        """Raises `ImageFormatError`."""
        if len(content) < _HEAD_BYTES or struct.unpack_from("<I", content)[0] != _COMMON_MAGIC:
            raise ImageFormatError("does not begin as an image file does")
        return cls(content[:_HEAD_BYTES], tuple(_messages(content)))

    def content(self) -> bytes:
        """The reverse of `parse`."""
        framed = (struct.pack("<I", len(message)) + message for message in self.messages)
        return self.head + b"".join(framed)


def _messages(content: bytes) -> Iterator[bytes]:
    at = _HEAD_BYTES
    while at < len(content):
        if at + 4 > len(content):
            raise ImageFormatError("ends within a message's size")
        begin = at + 4
        at = begin + struct.unpack_from("<I", content, at)[0]
        if at > len(content):
            raise ImageFormatError("ends within a message")
        yield content[begin:at]


def parse_message(message: bytes) -> tuple[Field, ...]:
    """The fields of a protobuf message. Raises `ImageFormatError`."""
    fields = []
    at = 0
    while at < len(message):
        key, at = _parse_varint(message, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _parse_varint(message, at)
        else:
            size = 8 if kind == _FIXED64 else 4
            if kind == _BYTES:
                size, at = _parse_varint(message, at)
            elif kind not in (_FIXED64, _FIXED32):
                raise ImageFormatError(f"has a field of the unknown kind {kind}")
            value = message[at : at + size]
            at += size
            if len(value) < size:
                raise ImageFormatError("ends within a field")
        fields.append(Field(number, kind, value))
    return tuple(fields)


def encode_message(fields: Sequence[Field]) -> bytes:
    """The reverse of `parse_message`."""
    parts = []
    for field in fields:
        parts.append(_encode_varint(field.number << 3 | field.kind))
        if isinstance(field.value, int):
            parts.append(_encode_varint(field.value))
        else:
            if field.kind == _BYTES:
                parts.append(_encode_varint(len(field.value)))
            parts.append(field.value)
    return b"".join(parts)


def number_of(fields: Sequence[Field], number: int) -> int | None:
    """The last value of a varint field; None where the message has none."""
    found = None
    for field in fields:
        if field.number == number and isinstance(field.value, int):
            found = field.value
    return found


def _parse_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise ImageFormatError("has a number without an end")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
