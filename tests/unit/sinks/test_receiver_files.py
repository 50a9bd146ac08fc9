"""Files of a receiver's connection are read again when they change, for each kind of sink."""

from __future__ import annotations

import shutil
import ssl
from typing import TYPE_CHECKING, Any

import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import Secret, load_settings
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.settings import SinkSettings
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import KINDS, Posting, posting, serving
from tests.unit.sinks.receiver import receiving

if TYPE_CHECKING:
    from pathlib import Path

LOGINS = {
    "password": ("Basic bWU6Zmlyc3Q=", "Basic bWU6c2Vjb25k"),
    "bearer_token": ("Bearer first", "Bearer second"),
}


async def is_taken(client: Posting) -> bool:
    """Return whether a request succeeds one second later."""
    client.clock.advance(1.0)
    try:
        await client.send()
    except ReceiverUnavailableError:
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("login", LOGINS)
async def test_a_changed_login_is_used_by_the_next_request(
    kind: str, login: str, tmp_path: Path
) -> None:
    file, (first, second) = tmp_path / login, LOGINS[login]
    file.write_text("first\n")
    given: dict[str, Any] = {login: Secret.load(file, name=login)}
    if login == "password":
        given["username"] = "me"
    async with receiving() as receiver, posting(kind, receiver.url, **given) as client:
        receiver.login = first
        assert await is_taken(client)
        receiver.login = second
        assert not await is_taken(client)
        file.write_text("second\n")
        assert await is_taken(client)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_header_has_the_current_value_of_its_file(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first\n")
    given: dict[str, Any] = {"header_files": {"X-Api-Key": str(file)}}
    async with receiving() as receiver, posting(kind, receiver.url, **given) as client:
        assert await is_taken(client)
        file.write_text("second\n")
        assert await is_taken(client)

    assert [one.headers["X-Api-Key"] for one in receiver.received] == ["first", "second"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_changed_authority_is_used_by_the_next_request(kind: str, tmp_path: Path) -> None:
    first, second = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    file = tmp_path / "ca.pem"
    shutil.copy(first.certificate, file)
    async with (
        receiving(context=serving(second)) as receiver,
        posting(kind, receiver.url, ca_file=str(file)) as client,
    ):
        assert not await is_taken(client)
        shutil.copy(second.certificate, file)
        assert await is_taken(client)
        shutil.copy(first.certificate, file)
        assert not await is_taken(client), "no request goes over the connection that is open"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_changed_client_certificate_is_used_by_the_next_request(
    kind: str, tmp_path: Path
) -> None:
    authority, other = (Authority(folder=tmp_path / name) for name in ("first", "second"))
    context = serving(authority)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(authority.certificate)
    wrong, right = other.issue("sink"), authority.issue("sink")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(wrong.certificate, certificate)
    shutil.copy(wrong.key, key)
    async with (
        receiving(context=context) as receiver,
        posting(
            kind,
            receiver.url,
            ca_file=str(authority.certificate),
            cert_file=str(certificate),
            key_file=str(key),
        ) as client,
    ):
        assert not await is_taken(client)
        shutil.copy(right.certificate, certificate)
        shutil.copy(right.key, key)
        assert await is_taken(client)


GIVEN: dict[str, dict[str, str]] = {
    "PASSWORD": {"USERNAME": "me"},
    "PROXY_PASSWORD": {"PROXY_USERNAME": "me", "PROXY_URL": "http://proxy:3128"},
    "BEARER_TOKEN": {},
    "OAUTH__CLIENT_SECRET": {"OAUTH__TOKEN_URL": "https://issuer.test", "OAUTH__CLIENT_ID": "me"},
}


def load(section: str, **given: str) -> SinkSettings:
    environ = {f"GPULEDGER_{section.upper()}__{name}": value for name, value in given.items()}
    return load_settings(
        SinkSettings,
        prog="p",
        description="",
        options=[],
        argv=[],
        environ=environ | {"GPULEDGER_KIND": section},
    )


@pytest.mark.parametrize("section", KINDS)
@pytest.mark.parametrize("secret", GIVEN)
def test_a_secret_can_be_in_a_file_and_is_never_shown(
    section: str, secret: str, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    found = load(section, **GIVEN[secret], **{f"{secret}_FILE": str(file)})
    assert found != load(section)
    assert "hunter2" not in repr(found)


@pytest.mark.parametrize("section", KINDS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROXY_URL", "http://me:hunter2@proxy", "proxy_password_file"),
        ("NO_PROXY", "a,b", "requires proxy_url"),
        ("SERVER_NAME", "receiver.internal", "is not https"),
        ("MIN_TLS_VERSION", "1.1", "expected one of 1.2, 1.3"),
        ("OAUTH__TOKEN_URL", "http://issuer", "expected https"),
    ],
)
def test_an_invalid_setting_is_reported_by_the_name_that_the_user_wrote(
    section: str, name: str, value: str, message: str
) -> None:
    with pytest.raises(
        SettingsError, match=rf"GPULEDGER_{section.upper()}__{name}: .*{message}"
    ) as no:
        load(section, **{name: value})
    assert "hunter2" not in str(no.value)
