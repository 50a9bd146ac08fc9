"""Loads certificates and keys from PEM files; every error names the setting and the file.

This module also reads the validity of certificates. It loads expired certificates, too, because the
other side decides by its own clock whether to accept them. The caller decides how to react.
"""

import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from gpuledger.errors import SettingsError
from gpuledger.small_files import MAX_PEM_BYTES, read_small_file
from gpuledger.texts import shorten_middle

_CERTIFICATE: Final = b"CERTIFICATE-----"
_KEY: Final = b"PRIVATE KEY-----"
_BEGIN: Final = b"-----BEGIN "
_UNMATCHED: Final = "KEY_VALUES_MISMATCH"

# ruff: noqa: SLF001  # the standard library has no public way to decode a certificate file


@dataclass(frozen=True, kw_only=True)
class Validity:
    """The period in which a certificate is valid."""

    setting: str
    """The setting that names the certificate's file."""
    file: Path
    subject: str
    """The certificate's common name, or its whole subject if it has no common name."""
    begin_seconds: float
    """Unix time from which the certificate is valid."""
    end_seconds: float
    """Unix time until which the certificate is valid."""

    def mistake_at(self, now_seconds: float) -> str:
        """Return the reason why the certificate is invalid at a Unix time; empty if it is valid."""
        certificate = f"{self.setting}: the certificate of {self.subject!r} in {self.file}"
        begin, end = (
            f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
            for seconds in (self.begin_seconds, self.end_seconds)
        )
        if now_seconds > self.end_seconds:
            return f"{certificate} expired on {end}; replace it"
        if now_seconds < self.begin_seconds:
            return f"{certificate} is not valid before {begin}; check this machine's clock"
        return ""

    @classmethod
    def of(cls, decoded: Mapping[str, Any], *, setting: str, file: Path) -> "Validity | None":
        """Return the validity of a certificate decoded by `ssl`; `None` if its dates are invalid.

        Some CA certificates have no common name; the whole subject is then used as the name.
        """
        pairs = [pair for part in decoded.get("subject", ()) for pair in part]
        names = [value for name, value in pairs if name == "commonName"]
        with suppress(ValueError, KeyError):
            return cls(
                setting=setting,
                file=file,
                subject=names[-1] if names else ", ".join(value for _, value in pairs),
                begin_seconds=ssl.cert_time_to_seconds(decoded["notBefore"]),
                end_seconds=ssl.cert_time_to_seconds(decoded["notAfter"]),
            )
        return None


def load_own(
    context: ssl.SSLContext,
    *,
    prefix: str,
    cert_file: Path,
    key_file: Path,
    password: str | None = None,
) -> list[Validity]:
    """Load this program's certificate and key; return the validity of each certificate in the file.

    The settings are named `<prefix>cert_file`, `<prefix>key_file` and `<prefix>key_password`.
    `password` is empty if the user set none, and `None` if there is no setting for it. Raises
    `SettingsError` with the name of the wrong setting.
    """
    certificate, key = f"{prefix}cert_file", f"{prefix}key_file"
    _require_pem(cert_file, _CERTIFICATE, setting=certificate, what="a certificate")
    _require_pem(key_file, _KEY, setting=key, what="a private key")
    with naming(certificate, cert_file):
        own = _decode(cert_file, setting=certificate)
    was_prompted = False

    def answer_password() -> str:
        # Without this function, OpenSSL would prompt on the terminal and wait.
        nonlocal was_prompted
        was_prompted = True
        return password or ""

    try:
        context.load_cert_chain(cert_file, key_file, answer_password)
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == _UNMATCHED:
            message = f"{key}: {key_file} is not the key of the certificate in {cert_file}"
        elif was_prompted:
            message = _explain_password(key_file, prefix=prefix, password=password)
        else:
            message = f"{key}: {key_file} with {cert_file} cannot be used: damaged ({error})"
        raise SettingsError(shorten_middle(message)) from error
    # The CA certificates that follow in the file are already loaded with the certificate. They are
    # loaded again here only for their validity. One that fails to load here is ignored, because
    # clients cannot use it either.
    chain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLError, OSError):
        chain.load_verify_locations(cafile=cert_file)
    found = (
        Validity.of(decoded, setting=certificate, file=cert_file)
        for decoded in chain.get_ca_certs()
    )
    return [own, *filter(None, found)]


def trusting(*, setting: str, file: Path | None) -> tuple[ssl.SSLContext, list[Validity]]:
    """Return a client's TLS context, and the validity of the CA certificates that it trusts.

    It trusts only those in the file; without a file, those of the system. Raises `SettingsError`.
    """
    if file is None:
        return ssl.create_default_context(), []
    _require_pem(file, _CERTIFICATE, setting=setting, what="a certificate")
    with naming(setting, file):
        context = ssl.create_default_context(cafile=file)
    return context, _authorities_of(context, setting=setting, file=file)


def load_authorities(context: ssl.SSLContext, *, setting: str, file: Path) -> list[Validity]:
    """Make a TLS context trust the CA certificates in a file, and return their validity.

    Raises `SettingsError`.
    """
    _require_pem(file, _CERTIFICATE, setting=setting, what="a certificate")
    with naming(setting, file):
        context.load_verify_locations(file)
    return _authorities_of(context, setting=setting, file=file)


def _authorities_of(context: ssl.SSLContext, *, setting: str, file: Path) -> list[Validity]:
    """Return a list of at most one item: the validity of the CA certificate that expires last.

    One valid CA certificate is enough, for example while an old one is being replaced. If the
    context has no CA certificate, the first certificate in the file counts, because it is trusted
    directly. The list is empty if no validity can be read.
    """
    found = [
        validity
        for decoded in context.get_ca_certs()
        if (validity := Validity.of(decoded, setting=setting, file=file))
    ]
    if not found:
        with suppress(ssl.SSLError, SettingsError, OSError):
            found = [_decode(file, setting=setting)]
    return sorted(found, key=lambda validity: validity.end_seconds)[-1:]


@contextmanager
def naming(setting: str, file: Path) -> Iterator[None]:
    """Convert errors in reading a file to `SettingsError` with the setting and the file."""
    try:
        yield
    except ssl.SSLError as error:
        message = f"{setting}: {file} cannot be used: a certificate in it is damaged ({error})"
        raise SettingsError(shorten_middle(message)) from error
    except (OSError, ValueError) as error:
        message = f"{setting}: cannot read {file}: {getattr(error, 'strerror', None) or error}"
        raise SettingsError(shorten_middle(message)) from error


def _require_pem(file: Path, kind: bytes, *, setting: str, what: str) -> None:
    with naming(setting, file):
        content = read_small_file(file, max_bytes=MAX_PEM_BYTES)
    if _BEGIN not in content:
        message = f"{setting}: {file} is not a PEM file; expected {what}"
        raise SettingsError(shorten_middle(message))
    if kind not in content:
        block = kind.decode()
        message = f"{setting}: missing block {block} in {file}; expected {what}"
        raise SettingsError(shorten_middle(message))


def _explain_password(key_file: Path, *, prefix: str, password: str | None) -> str:
    if password is None:
        return f"{prefix}key_file: the key in {key_file} has a password; store it there without one"
    wrong = "the given one does not open it" if password else "none was given"
    return f"{prefix}key_password: the key in {key_file} has a password, and {wrong}"


def _decode(file: Path, *, setting: str) -> Validity:
    """Return the validity of the first certificate in a file; raise `ssl.SSLError` if damaged."""
    decoded: Mapping[str, Any] = ssl._ssl._test_decode_cert(file)  # type: ignore[attr-defined]  # see above
    validity = Validity.of(decoded, setting=setting, file=file)
    if validity is None:
        raise SettingsError(f"{setting}: the certificate in {file} has invalid dates")
    return validity
