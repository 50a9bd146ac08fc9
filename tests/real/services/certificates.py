"""A certificate authority for one test run: EC keys and PEM files, without state."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = dt.timedelta(days=2)


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """The files of a certificate and its private key (PKCS#8)."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority with its files in `folder`."""

    def __init__(self, *, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _distinguished_name("gpuledger tests", None)
        self.certificate = folder / "ca.pem"
        usage = x509.BasicConstraints(ca=True, path_length=None)
        builder = _builder(self._name, self._name, self._key.public_key())
        signed = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        self.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        common_name: str,
        *,
        organization: str | None = None,
        lifetime: dt.timedelta = LIFETIME,
        host: str | None = None,
    ) -> KeyPair:
        """Issue a certificate for 127.0.0.1 and localhost, which a client may present as well.

        With `host` it is only for that host. With a negative lifetime it has already expired; it
        starts at least an hour before now.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _distinguished_name(common_name, organization)
        names: list[x509.GeneralName] = [x509.DNSName(host or "localhost")]
        if host is None:
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._name, key.public_key(), lifetime)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        return self._write(common_name, builder.sign(self._key, hashes.SHA256()), key)

    def _write(
        self, name: str, signed: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> KeyPair:
        stem = name.replace(":", "-")
        pair = KeyPair(
            certificate=self._folder / f"{stem}.pem", key=self._folder / f"{stem}-key.pem"
        )
        pair.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        # Kafka reads only PKCS#8.
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return pair


def _distinguished_name(common_name: str, organization: str | None) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    lifetime: dt.timedelta = LIFETIME,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + lifetime)
    )
