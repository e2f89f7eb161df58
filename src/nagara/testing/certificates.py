"""Certificates of a cluster for tests: an authority, and folders of members as `--certificates`.

Needs the package cryptography.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """Who signs."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    def member(self, folder: Path, name: str = "member", *, is_over: bool = False) -> Path:
        """Makes the folder with ca.pem, cert.pem and key.pem; `is_over`: valid until yesterday."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = _certificate(name, key, self.certificate.subject, self.key, is_over=is_over)
        folder.mkdir(parents=True)
        pem = serialization.Encoding.PEM
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(pem))
        (folder / "cert.pem").write_bytes(signed.public_bytes(pem))
        (folder / "key.pem").touch(mode=0o600)
        (folder / "key.pem").write_bytes(
            key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )
        return folder


def new_authority(name: str = "cluster") -> Authority:
    """An authority nobody has heard of before."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return Authority(_certificate(name, key, subject, key, is_authority=True), key)


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
    is_over: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * _DAY)
        .not_valid_after(now - _DAY if is_over else now + 30 * _DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )
