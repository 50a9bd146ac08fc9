"""A new connection uses the certificates and passwords that the files contain at that time."""
# ruff: noqa: SLF001  # aiokafka's own names, which are replaced

import datetime as dt
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiokafka.conn import AIOKafkaConnection
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from gpuledger.bus.aiokafka_patches.logins import encode_password_at_login
from gpuledger.bus.kafka_connection import CurrentContext, CurrentPassword, KafkaCredentials
from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.settings import KafkaSettings, Secret
from tests.errors import has_words
from tests.fakes.seconds import Seconds
from tests.real.services.certificates import Authority


class Files:
    """The credential files, and the object that reads them."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder=folder)
        pair = self.authority.issue("client")
        self.certificate, self.key, self.password = pair.certificate, pair.key, folder / "password"
        self.password.write_text("first\n")
        self.clock = Seconds()
        self.days_later = 0
        self.check = Readiness().check("kafka.credentials", severity=CheckSeverity.WARNING)
        self.credentials = KafkaCredentials(
            KafkaSettings(
                security_protocol="SASL_SSL",
                sasl_username="u",
                sasl_password=Secret.load(self.password, name="kafka.sasl_password"),
                ssl_ca_file=self.authority.certificate,
                ssl_cert_file=self.certificate,
                ssl_key_file=self.key,
            ),
            check=self.check,
            monotonic=self.clock,
            time_seconds=lambda: time.time() + self.days_later * 86400,
        )

    def later(self) -> None:
        """Advance the clock past the interval at which the files are checked."""
        self.clock.advance(10)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "files")


def authorities(context: ssl.SSLContext) -> list[bytes]:
    return context.get_ca_certs(binary_form=True)


def test_a_changed_password_is_used_for_the_next_login(files: Files) -> None:
    files.password.write_text("second, longer\n")
    assert files.credentials.password() == "first"
    files.later()
    assert files.credentials.password() == "second, longer"


def test_changed_ca_certificates_replace_the_old_ones(files: Files, tmp_path: Path) -> None:
    before = authorities(files.credentials.context())
    other = Authority(folder=tmp_path / "other").certificate
    other.replace(files.authority.certificate)
    files.later()
    after = authorities(files.credentials.context())
    assert len(after) == 1
    assert after != before


@pytest.mark.parametrize("name", ["certificate", "key", "password"])
@pytest.mark.parametrize("damage", ["", "damaged, and longer than it was before", None])
def test_damaged_files_are_logged_once_and_the_old_ones_stay_in_force(
    files: Files, name: str, damage: str | None
) -> None:
    before = files.credentials.context()
    file: Path = getattr(files, name)
    if damage is None:
        file.unlink()
    elif damage and name == "password":
        file.write_bytes(b"\xff\xfe")
    else:
        file.write_text(damage)
    with capture_logs() as lines:
        for _ in range(3):
            files.later()
            assert files.credentials.context() is before
            assert files.credentials.password() == "first"
    assert [line["event"] for line in lines] == ["check_failed"]
    assert str(file) in lines[0]["detail"]
    assert "stays in force" in lines[0]["detail"]


def test_repaired_files_are_used_again(files: Files) -> None:
    key = files.key.read_bytes()
    files.key.write_text("no key")
    files.later()
    files.credentials.context()
    files.key.write_bytes(key)
    files.password.write_text("second\n")
    files.later()
    assert files.credentials.password() == "second"


def test_a_file_that_cannot_be_used_at_startup_is_named_in_the_error(tmp_path: Path) -> None:
    settings = KafkaSettings(security_protocol="SSL", ssl_ca_file=tmp_path / "ca.pem")
    with pytest.raises(SettingsError, check=has_words("kafka.ssl_ca_file", "ca.pem")):
        KafkaCredentials(settings, check=Check())


def test_an_invalid_file_and_its_repair_are_reported_even_without_a_connection(
    files: Files,
) -> None:
    assert files.check.is_ok
    password = files.password.read_bytes()
    files.password.write_bytes(b"")
    files.later()
    files.credentials.look()
    assert files.check.has_failed
    files.password.write_bytes(password)
    files.later()
    with capture_logs() as lines:
        files.credentials.look()
    assert files.check.is_ok
    assert [line["event"] for line in lines] == ["check_recovered", "kafka_credentials_read"]


def test_a_certificate_that_expires_in_use_is_reported_with_setting_name_and_date(
    files: Files,
) -> None:
    files.days_later = 3
    with capture_logs() as lines:
        for _ in range(3):
            files.later()
            files.credentials.look()
    (line,) = lines
    assert line["detail"].startswith("kafka.ssl_ca_file: the certificate of 'gpuledger tests' in ")
    assert "kafka.ssl_cert_file: the certificate of 'client' in " in line["detail"]
    assert " expired on 20" in line["detail"]


def test_an_expired_certificate_is_still_used(files: Files) -> None:
    """The other side decides by its own clock, and the previous certificate would be even older."""
    before = files.credentials.context()
    pair = files.authority.issue("old", lifetime=dt.timedelta(minutes=-5))
    pair.certificate.replace(files.certificate)
    pair.key.replace(files.key)
    files.later()
    assert files.credentials.context() is not before
    assert "'old'" in files.check.detail
    assert " expired on " in files.check.detail


@pytest.mark.parametrize("days", [-3, 3])
def test_the_expiry_time_of_a_certificate_is_a_metric_whatever_the_clock_shows(
    files: Files, days: int
) -> None:
    files.days_later = days
    for file in (files.certificate, files.authority.certificate):
        end_seconds = REGISTRY.get_sample_value(
            "gpuledger_certificate_not_after_timestamp_seconds", {"file": str(file)}
        )
        assert end_seconds is not None
        assert abs(end_seconds - time.time() - 2 * 86400) < 600
    files.credentials.look()
    assert ("is not valid before" in files.check.detail) == (days < 0)


def test_a_new_connection_uses_the_current_context() -> None:
    first, second = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    current = [first]
    context = CurrentContext(lambda: current[0])
    for expected in (first, second):
        current[0] = expected
        made = context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="a")
        assert made.context is expected


async def test_plain_and_scram_use_the_current_password_and_never_show_it() -> None:
    encode_password_at_login()
    password = CurrentPassword(lambda: "secret")
    connection = SimpleNamespace(
        _loop=None,
        _sasl_plain_username="u",
        _sasl_plain_password=password,
        _sasl_mechanism="SCRAM-SHA-512",
    )
    plain = AIOKafkaConnection.authenticator_plain(connection)
    scram = AIOKafkaConnection.authenticator_scram(connection)

    assert next(plain._authenticator) == (b"u\x00u\x00secret", True)
    assert scram._sasl_plain_password == b"secret"
    assert "secret" not in f"{password} {password!r}"
