"""The secret that all agents and control processes of one cluster share, as a file.

Whoever knows it can have any command run by root on any of the machines. It never crosses a
connection: each side proves that it knows it, over numbers that both have chosen just now.
"""

import contextlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from nagara.base.errors import UsageError

FILE_NAME = "cluster-token"
LEAST_CHARS = 32
PROOF_BYTES = 32

_MAKE = "make one with: openssl rand -hex 32"


@dataclass(frozen=True, slots=True)
class ClusterToken:
    """The secret. It is not shown in messages."""

    value: str = field(repr=False)

    def proof(self, role: str, *numbers: bytes) -> bytes:
        """What only somebody with the token can say about these numbers, in this role."""
        said = b"\n".join((b"nagara", role.encode(), *numbers))
        return hmac.digest(self.value.encode(), said, "sha256")

    def is_proof(self, given: bytes, role: str, *numbers: bytes) -> bool:
        """Whether somebody with the token has said it."""
        return hmac.compare_digest(given, self.proof(role, *numbers))


def read_token(file: Path) -> ClusterToken:
    """Raises `UsageError` for a file that others may read, or that holds no fit token."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"the cluster's token cannot be read: {what}", where=str(file), hint=_MAKE
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise UsageError("others may read the token", where=str(file), hint=f"chmod 600 {file}")
    if len(text) < LEAST_CHARS or not text.isascii() or not text.isprintable() or " " in text:
        raise UsageError(
            f"a token has to have {LEAST_CHARS} or more printable characters, on one line",
            where=str(file), hint=_MAKE,
        )  # fmt: skip
    return ClusterToken(text)


def own_token(file: Path) -> ClusterToken:
    """The token in the file, which is made with a new one where it is not there yet."""
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            temporary.touch(mode=0o600, exist_ok=False)
            temporary.write_text(secrets.token_hex(32) + "\n")
            os.link(temporary, file)  # whoever is first
        finally:
            temporary.unlink(missing_ok=True)
    return read_token(file)
