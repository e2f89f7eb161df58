"""The folder with a machine's certificate, as both ends of TLS.

    ca.pem     who signs the cluster's certificates; no other authority counts
    cert.pem   this machine's own, with what is needed to lead it back to the authority
    key.pem    its key, without a passphrase; only its owner may read it

Both ends show one. A name in a certificate says nothing: machines come and go with their
addresses, and whoever was given a certificate of this authority is a member of the cluster.
"""

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from nagara.base.errors import UsageError

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a process shows, and what it wants to see, in either role."""

    folder: Path
    as_agent: ssl.SSLContext
    as_caller: ssl.SSLContext


def read_certificates(folder: Path) -> Certificates:
    """Raises `UsageError` naming the file that is absent, unfit or readable by others."""
    if not folder.is_dir():
        raise UsageError(
            "there is no such folder", where=str(folder), hint=f"it holds {CA}, {CERT} and {KEY}"
        )
    for name in (CA, CERT, KEY):
        _check_readable(folder / name)
    if stat.S_IMODE((folder / KEY).stat().st_mode) & 0o077:
        file = folder / KEY
        raise UsageError("others may read the key", where=str(file), hint=f"chmod 600 {file}")
    return Certificates(
        folder,
        _context(folder, ssl.PROTOCOL_TLS_SERVER),
        _context(folder, ssl.PROTOCOL_TLS_CLIENT),
    )


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / CA)
    except ssl.SSLError as error:
        raise _unfit(folder / CA, "no certificate of an authority", error) from error
    try:
        context.load_cert_chain(folder / CERT, folder / KEY, password=_no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise _unfit(folder / KEY, f"not the key of {CERT}", error) from error
        is_cert = _has_certificate(folder / CERT)
        name, what = (KEY, "no key without a passphrase") if is_cert else (CERT, "no certificate")
        raise _unfit(folder / name, what, error) from error
    return context


def _no_passphrase() -> str:
    """Instead of a question at the terminal; what is decrypted with it is no key."""
    return ""


def _has_certificate(file: Path) -> bool:
    try:
        ssl.create_default_context(cafile=str(file))
    except ssl.SSLError:
        return False
    return True


def _check_readable(file: Path) -> None:
    try:
        if not file.read_bytes():
            raise UsageError("is empty", where=str(file))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=str(file)) from error


def _unfit(file: Path, what: str, error: ssl.SSLError) -> UsageError:
    said = error.reason or error.strerror or "unreadable"
    return UsageError(f"this is {what} in PEM form ({said})", where=str(file))
