"""An error in a certificate's or key's file is one line that names the right setting."""

import datetime as dt
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from gpuledger.certificates import Validity, load_own, trusting
from gpuledger.errors import SettingsError
from tests.errors import has_words
from tests.real.services.certificates import Authority

GARBAGE = "-----BEGIN {0}-----\nAAAA\n-----END {0}-----\n"
PASSWORD = b"right"


class Files:
    """A certificate of our own with its key, which is opened with the given password."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder=folder)
        pair = self.authority.issue("client")
        self.certificate, self.key = pair.certificate, pair.key
        self.password: str | None = ""

    def load(self) -> list[Validity]:
        return load_own(
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            prefix="kafka.ssl_",
            cert_file=self.certificate,
            key_file=self.key,
            password=self.password,
        )

    def encrypt(self, *, given: str | None) -> None:
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        self.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.BestAvailableEncryption(PASSWORD),
            )
        )
        self.password = given


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def make_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


MISTAKES: dict[str, tuple[Callable[[Files], object], str]] = {
    "key gone": (lambda f: f.key.unlink(), "ssl_key_file: cannot read K: No such file"),
    "key unreadable": (
        lambda f: make_directory(f.key),
        "ssl_key_file: cannot read K: Is a directory",
    ),
    "certificate gone": (lambda f: f.certificate.unlink(), "ssl_cert_file: cannot read C: No such"),
    "key not PEM": (lambda f: f.key.write_text("replace me"), "ssl_key_file: K is not a PEM file"),
    "certificate not PEM": (
        lambda f: f.certificate.write_text("x"),
        "ssl_cert_file: C is not a PEM",
    ),
    "certificate empty": (lambda f: f.certificate.write_text(""), "ssl_cert_file: C is not a PEM"),
    "a certificate for a key": (
        lambda f: f.key.write_bytes(f.certificate.read_bytes()),
        "ssl_key_file: missing block PRIVATE KEY----- in K",
    ),
    "a key for a certificate": (
        lambda f: f.certificate.write_bytes(f.key.read_bytes()),
        "ssl_cert_file: missing block CERTIFICATE----- in C",
    ),
    "key damaged": (
        lambda f: f.key.write_text(GARBAGE.format("PRIVATE KEY")),
        "ssl_key_file: K with C cannot be used: damaged",
    ),
    "certificate damaged": (
        lambda f: f.certificate.write_text(GARBAGE.format("CERTIFICATE")),
        "ssl_cert_file: C cannot be used: a certificate in it is damaged",
    ),
    "another's key": (
        lambda f: f.authority.issue("other").key.replace(f.key),
        "ssl_key_file: K is not the key of the certificate in C",
    ),
    "no password": (
        lambda f: f.encrypt(given=""),
        "ssl_key_password: the key in K has a password, and none was given",
    ),
    "wrong password": (
        lambda f: f.encrypt(given="wrong"),
        "ssl_key_password: the key in K has a password, and the given one does not open it",
    ),
    "an overlong password": (
        lambda f: f.encrypt(given="x" * 5000),
        "ssl_key_password: the key in K has a password, and the given one does not open it",
    ),
    "no setting for a password": (
        lambda f: f.encrypt(given=None),
        "ssl_key_file: the key in K has a password; store it there without one",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_names_the_setting_and_the_file(files: Files, mistake: str) -> None:
    make, expected = MISTAKES[mistake]
    make(files)
    with pytest.raises(SettingsError) as raised:
        files.load()
    message = str(raised.value).replace(str(files.key), "K").replace(str(files.certificate), "C")
    assert message.startswith(f"kafka.{expected}")
    assert "wrong" not in message


def test_an_error_for_a_very_long_file_name_fits_on_a_screen(
    files: Files,
) -> None:
    files.key = Path("x" * 30_000)
    with pytest.raises(SettingsError, check=has_words("kafka.ssl_key_file")) as raised:
        files.load()
    assert len(str(raised.value)) < 1000


def test_a_key_is_opened_with_its_password(files: Files) -> None:
    files.encrypt(given=PASSWORD.decode())

    assert len(files.load()) == 1


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read F: No such file or directory"),
        (
            "replace this by the authority's certificate",
            "F is not a PEM file; expected a certificate",
        ),
        (GARBAGE.format("PRIVATE KEY"), "missing block CERTIFICATE----- in F"),
        (GARBAGE.format("CERTIFICATE"), "F cannot be used: a certificate in it is damaged"),
    ],
)
def test_an_error_in_ca_certificates_names_the_setting_and_the_file(
    tmp_path: Path, content: str | None, expected: str
) -> None:
    file = tmp_path / "ca.crt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError) as raised:
        trusting(setting="alerts.ca_file", file=file)
    assert str(raised.value).replace(str(file), "F").startswith(f"alerts.ca_file: {expected}")


def test_the_ca_certificate_that_expires_last_counts(tmp_path: Path) -> None:
    """During an exchange the file contains both."""
    old, new = (Authority(folder=tmp_path / name) for name in ("old", "new"))
    expired = old.issue("expired", lifetime=dt.timedelta(minutes=-5)).certificate
    file = tmp_path / "both.pem"
    file.write_bytes(expired.read_bytes() + new.certificate.read_bytes())
    _, (validity,) = trusting(setting="s", file=file)
    assert validity.subject == "gpuledger tests"


def test_a_certificate_that_is_trusted_directly_expires_too(tmp_path: Path) -> None:
    file = Authority(folder=tmp_path).issue("server").certificate
    _, (validity,) = trusting(setting="s", file=file)
    assert validity.subject == "server"


def test_each_certificate_of_our_own_chain_is_reported(tmp_path: Path) -> None:
    authority = Authority(folder=tmp_path)
    pair = authority.issue("server")
    pair.certificate.write_bytes(pair.certificate.read_bytes() + authority.certificate.read_bytes())
    found = load_own(
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        prefix="tls_server_config.",
        cert_file=pair.certificate,
        key_file=pair.key,
    )
    assert [validity.subject for validity in found] == ["server", "gpuledger tests"]
