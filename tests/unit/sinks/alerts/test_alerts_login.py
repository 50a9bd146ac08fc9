"""Each Alertmanager gets the login that its files contain; an incomplete login is rejected."""

from pathlib import Path
from typing import Any

import pytest

from gpuledger.runtime import Readiness
from gpuledger.runtime.http.client import open_http
from gpuledger.settings import Secret
from gpuledger_sinks.alerts.receivers import AlertmanagerClient
from gpuledger_sinks.credentials import ReceiverCredentials
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import AlertsSettings, RemoteWriteSettings
from tests.fakes.seconds import Seconds
from tests.unit.sinks.receiver import receiving


async def test_alerts_use_the_current_login_of_the_file(tmp_path: Path) -> None:
    file, clock = tmp_path / "token", Seconds()
    file.write_text("first\n")
    settings = AlertsSettings(bearer_token=Secret.load(file, name="alerts.bearer_token"))
    check = Readiness().check("alerts.credentials")
    credentials = ReceiverCredentials(settings, section="alerts", check=check, monotonic=clock)
    async with receiving() as receiver, open_http(headers={}, timeout_seconds=5.0) as http:
        client = AlertmanagerClient(http=http, url=receiver.url, credentials=credentials)
        receiver.login = "Bearer first"
        await client.post([])
        receiver.login = "Bearer second"
        with pytest.raises(ReceiverUnavailableError, match="401"):
            await client.post([])
        file.write_text("second\n")
        clock.advance(1)
        await client.post([])
        file.write_text("")
        clock.advance(1)
        await client.post([])
    assert check.detail.startswith("alerts.bearer_token: ")


HALVES: dict[str, tuple[dict[str, Any], str]] = {
    "only a user": ({"username": "u"}, "username and password belong together"),
    "only a password": ({"password": Secret("p")}, "username and password belong together"),
    "both kinds": (
        {"username": "u", "password": Secret("p"), "bearer_token": Secret("t")},
        "bearer_token and username are mutually exclusive",
    ),
    "only a certificate": ({"cert_file": "c.pem"}, "cert_file and key_file belong together"),
    "only a key": ({"key_file": "k.pem"}, "cert_file and key_file belong together"),
}


@pytest.mark.parametrize("kind", [AlertsSettings, RemoteWriteSettings])
@pytest.mark.parametrize("half", HALVES)
def test_an_incomplete_login_is_rejected(kind: type[Any], half: str) -> None:
    given, expected = HALVES[half]
    with pytest.raises(ValueError, match=expected):
        kind(**given)


@pytest.mark.parametrize(
    "login", [{"username": "u", "password": Secret("p")}, {"bearer_token": Secret("t")}]
)
@pytest.mark.parametrize(
    ("kind", "field"), [(AlertsSettings, "urls"), (RemoteWriteSettings, "url")]
)
def test_a_login_in_the_address_excludes_another_login(
    kind: type[Any], field: str, login: dict[str, Any]
) -> None:
    """Both cannot be sent, and no request would ever leave."""
    url = "http://u:p@am:9093"
    with pytest.raises(ValueError, match=f"{field}: .*mutually exclusive"):
        kind(**{field: [url] if field == "urls" else url}, **login)
