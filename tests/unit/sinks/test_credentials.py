"""A request uses the current credentials of the files, or the last valid ones."""

import ssl
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, CheckSeverity, Readiness
from gpuledger.runtime.http.client import HttpClient, open_http
from gpuledger.settings import Secret
from gpuledger.settings.groups import ClientCredentialsSettings
from gpuledger_sinks.credentials import ReceiverCredentials
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.remote_write.protocol_in_force import ProtocolInForce
from gpuledger_sinks.remote_write.write_client import RemoteWriteClient
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.fakes.seconds import Seconds
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import posting
from tests.unit.sinks.receiver import Answer, receiving
from tests.unit.sinks.remote_write.messages import RawMessage

TOKEN, PASSWORD = "bearer_token", "password"
FIRST = {TOKEN: "Bearer first", PASSWORD: "Basic bWU6Zmlyc3Q="}
NOTHING = RawMessage()
SECOND = {TOKEN: "Bearer second", PASSWORD: "Basic bWU6c2Vjb25k"}


class Mounted:
    """Settings whose secret is in a file, and the credentials read from them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.file, self.ca_file = folder / kind, folder / "ca" / "ca.pem"
        self.authority = Authority(folder=folder / "ca")
        self.file.write_text("first\n")
        secret = Secret.load(self.file, name=f"remote_write.{kind}")
        login: dict[str, Any] = {kind: secret, "username": "me" if kind == PASSWORD else ""}
        self.settings = RemoteWriteSettings(ca_file=str(self.ca_file), **login)
        self.clock = Seconds()
        self.check = Readiness().check("remote_write.credentials", severity=CheckSeverity.WARNING)
        self.credentials = ReceiverCredentials(
            self.settings, section="remote_write", check=self.check, monotonic=self.clock
        )

    def client(self, http: HttpClient, url: str) -> RemoteWriteClient:
        """Return a client that uses the credentials."""
        protocol = ProtocolInForce("1.0", check=Check())
        return RemoteWriteClient(
            http=http, url=url, credentials=self.credentials, protocol=protocol
        )

    def login(self) -> str:
        """Return the login of a request one second later."""
        self.clock.advance(1.0)
        return self.credentials.current().headers["Authorization"]


@pytest.mark.parametrize("kind", [TOKEN, PASSWORD])
def test_a_changed_secret_is_used_by_the_next_request(tmp_path: Path, kind: str) -> None:
    mounted = Mounted(tmp_path, kind)
    assert mounted.login() == FIRST[kind]
    mounted.file.write_text("second\n")
    assert mounted.login() == SECOND[kind]


DAMAGES = {
    "gone": None,
    "empty": b"",
    "blank": b"\n",
    "not text": b"\xff\xfe-and-longer-than-before",
}


@pytest.mark.parametrize("kind", [TOKEN, PASSWORD])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_secret_keeps_the_previous_one_in_use_and_is_logged_once(
    tmp_path: Path, kind: str, damage: str
) -> None:
    mounted, content = Mounted(tmp_path, kind), DAMAGES[damage]
    if content is None:
        mounted.file.unlink()
    else:
        mounted.file.write_bytes(content)
    with capture_logs() as lines:
        for _ in range(3):
            assert mounted.login() == FIRST[kind]
        shown = mounted.check.detail
        mounted.file.write_text("second\n")
        assert mounted.login() == SECOND[kind]
    assert shown.startswith(f"remote_write.{kind}: ")
    assert str(mounted.file) in shown
    events = [line["event"] for line in lines]
    assert events == ["check_failed", "check_recovered", "receiver_credentials_read"]
    assert mounted.check.is_ok


@pytest.mark.parametrize("token", ["hunter2 words", "hunter2\tlines", "hunter2\u00f6", "  \n"])
def test_an_invalid_token_is_rejected_and_not_shown(tmp_path: Path, token: str) -> None:
    mounted = Mounted(tmp_path, TOKEN)
    mounted.file.write_text(token)
    assert mounted.login() == FIRST[TOKEN]
    assert "invalid token" in mounted.check.detail
    assert "hunter2" not in mounted.check.detail
    with pytest.raises(SettingsError, match="expected one word of printable ASCII"):
        ReceiverCredentials(mounted.settings, section="remote_write", check=mounted.check)


def test_a_damaged_authority_keeps_the_previous_one_in_use_and_is_named(
    tmp_path: Path,
) -> None:
    mounted = Mounted(tmp_path, TOKEN)
    before = mounted.credentials.current().trust
    mounted.ca_file.write_text("damaged")
    mounted.file.write_text("second\n")
    assert mounted.login() == FIRST[TOKEN], "files that came together count together"
    assert mounted.credentials.current().trust is before
    assert "remote_write.ca_file" in mounted.check.detail
    assert str(mounted.ca_file) in mounted.check.detail


@pytest.mark.parametrize("settings", [{}, {TOKEN: Secret("first")}])
def test_settings_without_a_file_are_valid_without_one(settings: dict[str, Any]) -> None:
    check = Readiness().check("remote_write.credentials", severity=CheckSeverity.WARNING)
    credentials = ReceiverCredentials(
        RemoteWriteSettings(**settings), section="remote_write", check=check
    )
    assert credentials.current().trust is True
    assert check.is_ok


async def test_only_the_current_authority_of_the_file_is_trusted(tmp_path: Path) -> None:
    """Even if a connection to a server of the previous one is still open."""
    mounted, other = Mounted(tmp_path, TOKEN), Authority(folder=tmp_path / "other")
    async with (
        receiving(context=_serving(mounted.authority)) as first,
        receiving(context=_serving(other)) as second,
        open_http(headers={}, timeout_seconds=5.0) as http,
    ):
        to_first, to_second = (mounted.client(http, each.url) for each in (first, second))
        await to_first.write(NOTHING, attempt=0)
        with pytest.raises(ReceiverUnavailableError, match="certificate"):
            await to_second.write(NOTHING, attempt=0)
        other.certificate.replace(mounted.ca_file)
        mounted.clock.advance(1.0)
        await to_second.write(NOTHING, attempt=1)
        with pytest.raises(ReceiverUnavailableError, match="certificate"):
            await to_first.write(NOTHING, attempt=0)


@pytest.mark.parametrize("kind", [TOKEN, PASSWORD])
async def test_a_rejected_request_succeeds_once_the_file_has_the_right_secret(
    tmp_path: Path, kind: str
) -> None:
    mounted = Mounted(tmp_path, kind)
    async with (
        receiving(context=_serving(mounted.authority)) as receiver,
        open_http(headers={}, timeout_seconds=5.0) as http,
    ):
        client = mounted.client(http, receiver.url)
        receiver.login = SECOND[kind]
        with pytest.raises(ReceiverUnavailableError, match="401 who are you"):
            await client.write(NOTHING, attempt=0)
        mounted.file.write_text("second\n")
        mounted.clock.advance(1.0)
        await client.write(NOTHING, attempt=1)


def _serving(authority: Authority) -> ssl.SSLContext:
    pair = authority.issue("receiver")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    return context


@pytest.mark.parametrize(
    ("kind", "setting"), [("remote_write", "remote_write.url"), ("alerts", "alerts.urls")]
)
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "cannot connect to 127.0.0.1:1: Connection refused"),
        ("http://no-such-host.invalid:9", "cannot connect to no-such-host.invalid:9: "),
        ("https://127.0.0.1:1", "cannot connect to 127.0.0.1:1: Connection refused"),
    ],
)
async def test_an_unavailable_receiver_is_reported_with_address_cause_and_setting(
    kind: str, setting: str, url: str, message: str
) -> None:
    async with posting(kind, url) as client:
        with pytest.raises(ReceiverUnavailableError) as raised:
            await client.send()

    text = str(raised.value)
    assert text.startswith(f"{url}")
    assert message in text
    assert text.endswith(f"; check {setting}")
    assert "ssl" not in text


async def test_an_unavailable_token_endpoint_does_not_name_the_receivers_address() -> None:
    oauth = ClientCredentialsSettings(
        token_url="https://127.0.0.1:1/token", client_id="me", client_secret=Secret("x")
    )
    async with posting("remote_write", "http://127.0.0.1:2", oauth=oauth) as client:
        with pytest.raises(ReceiverUnavailableError, match=r"127\.0\.0\.1:1") as raised:
            await client.send()

    assert "remote_write.url" not in str(raised.value)


async def test_a_receiver_that_rejects_the_login_is_not_reported_as_unresponsive() -> None:
    check = Readiness().check("remote_write.protocol", severity=CheckSeverity.WARNING)
    async with (
        receiving(Answer(401, "who?")) as receiver,
        open_http(headers={}, timeout_seconds=5) as http,
    ):
        client = RemoteWriteClient(
            http=http,
            url=receiver.url,
            credentials=ReceiverCredentials(
                RemoteWriteSettings(), section="remote_write", check=Check()
            ),
            protocol=ProtocolInForce("auto", check=check),
        )
        with pytest.raises(ReceiverUnavailableError, match="401"):
            await client.write(NOTHING, attempt=0)

    assert "no response so far shows the receiver's version" in check.detail
    assert "yet" not in check.detail
