"""Certificates and keys in PEM files: loaded, with each mistake named by its setting and file.

Here it is also read from when until when a certificate is valid. That it is not says nothing of
whether it is used: the other side decides that, by its own clock. What is done about it is
the caller's business.
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

# ruff: noqa: SLF001  # the standard library decodes a certificate of a file in no public way


@dataclass(frozen=True, kw_only=True)
class Validity:
    """From when until when a certificate is valid."""

    setting: str
    """The setting that names its file."""
    file: Path
    subject: str
    """Its common name."""
    begin_seconds: float
    """Unix time."""
    end_seconds: float
    """Unix time."""

    def mistake_at(self, now_seconds: float) -> str:
        """Return what is wrong with it at that time; empty while it is valid."""
        certificate = f"{self.setting}: the certificate of {self.subject!r} in {self.file}"
        begin, end = (
            f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%d %H:%M:%S} UTC"
            for seconds in (self.begin_seconds, self.end_seconds)
        )
        if now_seconds > self.end_seconds:
            return f"{certificate} expired on {end}; put a new one there"
        if now_seconds < self.begin_seconds:
            return f"{certificate} is not valid before {begin}; is this machine's clock right?"
        return ""

    @classmethod
    def of(cls, decoded: Mapping[str, Any], *, setting: str, file: Path) -> "Validity | None":
        """Return that of a certificate as `ssl` decodes it; `None` where its dates are none.

        One without a common name, as authorities may be, is named by all that its subject says.
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
    """Load what a side shows of itself; return the validity of each certificate in the file.

    Settings are named `<prefix>cert_file`, `<prefix>key_file` and `<prefix>key_password`. An empty
    password is one that was not given, `None` means that there is no such setting. Raises
    `SettingsError` naming the setting that has the mistake.
    """
    certificate, key = f"{prefix}cert_file", f"{prefix}key_file"
    _require_pem(cert_file, _CERTIFICATE, setting=certificate, what="a certificate")
    _require_pem(key_file, _KEY, setting=key, what="a private key")
    with naming(certificate, cert_file):
        own = _decode(cert_file, setting=certificate)
    was_prompted = False

    def answer_password() -> str:
        # Without this function OpenSSL would ask on the terminal, and wait there.
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
    # The authorities that follow in the file. They are loaded with the certificate already; what
    # cannot be loaded here is of no use to a client either, and has no validity to look after.
    chain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with suppress(ssl.SSLError, OSError):
        chain.load_verify_locations(cafile=cert_file)
    found = (
        Validity.of(decoded, setting=certificate, file=cert_file)
        for decoded in chain.get_ca_certs()
    )
    return [own, *filter(None, found)]


def trusting(*, setting: str, file: Path) -> ssl.SSLContext:
    """Return a client's context that trusts the authorities in a file alone.

    Raises `SettingsError` naming the setting.
    """
    _require_pem(file, _CERTIFICATE, setting=setting, what="a certificate")
    with naming(setting, file):
        return ssl.create_default_context(cafile=file)


def load_authorities(context: ssl.SSLContext, *, setting: str, file: Path) -> None:
    """Let a context trust the authorities in a file; raises `SettingsError` naming the setting."""
    _require_pem(file, _CERTIFICATE, setting=setting, what="a certificate")
    with naming(setting, file):
        context.load_verify_locations(file)


def authorities_of(context: ssl.SSLContext, *, setting: str, file: Path) -> list[Validity]:
    """Return the validity of the authority that ends last, of those that a context has of a file.

    One of several is enough, as while an old one is exchanged for a new one. Where there is none
    it is a certificate that is trusted itself.
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
    """Raise `SettingsError` naming setting and file for what goes wrong in reading it."""
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
        message = f"{setting}: {file} is no PEM file: expected {what} in it"
        raise SettingsError(shorten_middle(message))
    if kind not in content:
        block = kind.decode()
        message = f"{setting}: there is no block {block} in {file}: expected {what}"
        raise SettingsError(shorten_middle(message))


def _explain_password(key_file: Path, *, prefix: str, password: str | None) -> str:
    if password is None:
        return f"{prefix}key_file: the key in {key_file} has a password; store it there without one"
    wrong = "the given one does not open it" if password else "none was given"
    return f"{prefix}key_password: the key in {key_file} has a password, and {wrong}"


def _decode(file: Path, *, setting: str) -> Validity:
    """Return the validity of the first certificate in a file; raises ssl.SSLError."""
    decoded: Mapping[str, Any] = ssl._ssl._test_decode_cert(file)  # type: ignore[attr-defined]  # see above
    validity = Validity.of(decoded, setting=setting, file=file)
    if validity is None:
        raise SettingsError(f"{setting}: the certificate in {file} has dates that are none")
    return validity
