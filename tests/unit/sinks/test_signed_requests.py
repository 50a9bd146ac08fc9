"""Requests that are signed for AWS: which keys, their expiry, and what is shown of them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from gpuledger.errors import SettingsError
from gpuledger.runtime import Check
from gpuledger.settings import Secret
from gpuledger_sinks.credentials import ReceiverCredentials
from gpuledger_sinks.errors import ReceiverUnavailableError
from gpuledger_sinks.receiver_settings import Sigv4Settings
from gpuledger_sinks.settings import RemoteWriteSettings
from gpuledger_sinks.sigv4 import AwsKeys, signature_headers
from tests.fakes.token_issuer import TokenIssuer, TokenKeys
from tests.real.services.certificates import Authority
from tests.unit.sinks.posting import posting
from tests.unit.sinks.receiver import Answer, Receiver, receiving

if TYPE_CHECKING:
    from pathlib import Path

REGION = "eu-central-1"
SECRET, POD_TOKEN = "wJalrXUtnFEMI-secret", "ey.the-pods-own.token"
FOR_SECONDS = 1000.0


def signed(receiver: Receiver, keys: AwsKeys, *, at_seconds: float = 0.0) -> list[bool]:
    """Return for each request whether it was signed by these keys, at that time."""
    return [
        received.headers["Authorization"]
        == signature_headers(
            receiver.url,
            received.body,
            keys=keys,
            region=REGION,
            service="aps",
            time_seconds=at_seconds,
        )["Authorization"]
        for received in receiver.received
    ]


async def test_a_request_is_signed_with_the_current_keys_of_the_files(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first\n")
    secret = Secret.load(file, name="secret_access_key")
    sigv4 = Sigv4Settings(region=REGION, access_key_id="AKID", secret_access_key=secret)
    first, second = (
        AwsKeys(access_key_id="AKID", secret_access_key=text) for text in ("first", "second")
    )
    async with (
        receiving() as receiver,
        posting("remote_write", receiver.url, sigv4=sigv4) as client,
    ):
        await client.send()
        assert signed(receiver, first) == [True]
        file.write_text("second\n")
        receiver.received.clear()
        client.clock.advance(1.0)
        await client.send()
        assert signed(receiver, second, at_seconds=1.0) == [True]
        file.write_text("")
        receiver.received.clear()
        client.clock.advance(1.0)
        await client.send()
        assert signed(receiver, second, at_seconds=2.0) == [True]
        assert "remote_write.sigv4.secret_access_key: " in client.check.detail
        receiver.received.clear()
        receiver.answers = [Answer(403, "SignatureDoesNotMatch")]
        with pytest.raises(ReceiverUnavailableError, match="403 SignatureDoesNotMatch"):
            await client.send()
        assert "rejected the credentials: 403" in client.token_check.detail
        file.write_text("first\n")
        client.clock.advance(1.0)
        await client.send()
        assert signed(receiver, first, at_seconds=3.0) == [False, True]
        assert client.token_check.is_ok


class Sts(TokenIssuer):
    """STS that issues other keys for each token."""

    def __init__(self) -> None:
        super().__init__(TokenKeys())
        self.end_seconds = FOR_SECONDS
        self.set_keys(1)

    def set_keys(self, number: int) -> AwsKeys:
        """Answer with the keys of that number from now on; return the keys."""
        keys = AwsKeys(
            access_key_id=f"ASIA{number}",
            secret_access_key=f"{SECRET}/+={number}",
            session_token=f"session/+={number}",
        )
        end = datetime.fromtimestamp(self.end_seconds, tz=UTC)
        body = (
            '<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">'
            "<AssumeRoleWithWebIdentityResult><Credentials>\n"
            f"<SessionToken>{keys.session_token}</SessionToken>\n"
            f"<SecretAccessKey>{keys.secret_access_key}</SecretAccessKey>\n"
            f"<Expiration>{end:%Y-%m-%dT%H:%M:%SZ}</Expiration>\n"
            f"<AccessKeyId>{keys.access_key_id}</AccessKeyId></Credentials>"
            "</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        ).encode()
        self.raw = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        return keys


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """Return the authority that the system trusts, because STS has no setting for it."""
    made = Authority(folder=tmp_path / "authority")
    monkeypatch.setenv("SSL_CERT_FILE", str(made.certificate))
    return made


def assumed(folder: Path, sts_url: str, **given: Any) -> dict[str, Any]:  # noqa: ANN401  # any settings
    """Return the settings of a role; contexts are recreated for TLS 1.3."""
    file = folder / "token"
    file.write_text(POD_TOKEN)
    role = {"role_arn": "arn:aws:iam::1:role/r", "web_identity_token_file": str(file), **given}
    return {
        "sigv4": Sigv4Settings(region=REGION, sts_url=sts_url, **role),
        "min_tls_version": "1.3",
    }


async def test_a_role_is_assumed_with_the_token_of_the_file_and_again_before_its_keys_expire(
    authority: Authority, tmp_path: Path
) -> None:
    sts = Sts()
    first = sts.set_keys(1)
    async with (
        sts.serve(authority) as url,
        receiving() as receiver,
        posting("remote_write", receiver.url, **assumed(tmp_path, url)) as client,
    ):
        await client.send()
        await client.send()
        assert signed(receiver, first) == [True, True]
        assert receiver.received[0].headers["X-Amz-Security-Token"] == first.session_token
        receiver.received.clear()
        sts.end_seconds *= 2
        second = sts.set_keys(2)
        (tmp_path / "token").write_text("another")
        client.clock.advance(FOR_SECONDS * 0.9)
        await client.send()
        assert signed(receiver, second, at_seconds=FOR_SECONDS * 0.9) == [True]
        shown = f"{client.credentials.current()} {client.token_check.detail}"
    forms = [parse_qs(form) for _, form in sts.requests]
    assert [form["WebIdentityToken"] for form in forms] == [[POD_TOKEN], ["another"]]
    assert forms[0]["RoleArn"] == ["arn:aws:iam::1:role/r"]
    assert forms[0]["Action"] == ["AssumeRoleWithWebIdentity"]
    assert SECRET not in shown


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "refusal": (
        {"raw": b"HTTP/1.1 403 No\r\nContent-Length: 40\r\n\r\n<Code>AccessDenied " + b"x" * 21},
        "403: <Code>AccessDenied .*role_arn",
    ),
    "quote": (
        {"raw": b"HTTP/1.1 400 No\r\nContent-Length: 21\r\n\r\n" + POD_TOKEN.encode()},
        r"400: \*{8}",
    ),
    "page": ({"raw": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"}, "200 without Access"),
    "junk": ({"raw": b"\x00\xff\r\n\r\n"}, "no valid HTTP"),
    "silence": ({"hangs": True}, "no answer within 0.5 s"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
async def test_an_exchange_without_keys_in_its_response_is_named_and_shows_no_secret(
    refusal: str, authority: Authority, tmp_path: Path
) -> None:
    sts, (set_up, message) = Sts(), REFUSALS[refusal]
    good = sts.raw
    for name, value in set_up.items():
        setattr(sts, name, value)
    async with (
        sts.serve(authority) as url,
        receiving() as receiver,
        posting(
            "remote_write", receiver.url, timeout_seconds=1.0, **assumed(tmp_path, url)
        ) as client,
    ):
        with pytest.raises(ReceiverUnavailableError, match=message) as caught:
            await client.send()
        assert str(caught.value) == client.token_check.detail
        sts.raw, sts.hangs = good, False
        client.clock.advance(2.0)
        await client.send()
    assert f"remote_write.sigv4.role_arn by {url}: " in str(caught.value)
    assert POD_TOKEN not in str(caught.value)
    assert len(receiver.received) == 1


async def test_expired_keys_are_not_used_for_signing(authority: Authority, tmp_path: Path) -> None:
    sts = Sts()
    sts.end_seconds = -60.0
    sts.set_keys(1)
    async with (
        sts.serve(authority) as url,
        receiving() as receiver,
        posting("remote_write", receiver.url, **assumed(tmp_path, url)) as client,
    ):
        with pytest.raises(ReceiverUnavailableError, match="keys that have expired"):
            await client.send()
    assert not receiver.received


async def test_a_missing_token_of_the_pod_is_named(tmp_path: Path) -> None:
    settings = assumed(tmp_path, "https://sts.invalid/")
    (tmp_path / "token").unlink()
    async with posting("remote_write", "http://receiver.invalid", **settings) as client:
        with pytest.raises(ReceiverUnavailableError, match=r"web_identity_token_file: cannot read"):
            await client.send()


def test_a_role_from_the_environment_is_used_and_without_any_the_remedy_is_reported(
    tmp_path: Path,
) -> None:
    settings = RemoteWriteSettings(sigv4=Sigv4Settings(region=REGION))

    def made(**environ: str) -> ReceiverCredentials:
        return ReceiverCredentials(
            settings, section="remote_write", check=Check(), sigv4=settings.sigv4, environ=environ
        )

    made(AWS_ROLE_ARN="arn", AWS_WEB_IDENTITY_TOKEN_FILE=str(tmp_path / "token"))
    for environ in ({}, {"AWS_ROLE_ARN": "arn"}, {"AWS_WEB_IDENTITY_TOKEN_FILE": "/token"}):
        with pytest.raises(SettingsError, match=r"remote_write\.sigv4\.region: .*role_arn and web"):
            made(**environ)


KEYS: dict[str, Any] = {"access_key_id": "AKID", "secret_access_key": Secret(SECRET)}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no region": (KEYS, "access_key_id: requires region"),
    "region": ({"region": "eu/west"}, "region: invalid value: 'eu/west'"),
    "service": ({"region": REGION, "service": "a b"}, "service: invalid value: 'a b'"),
    "half": (
        {"region": REGION, "access_key_id": "AKID"},
        "access_key_id and secret_access_key belong",
    ),
    "both": (
        {"region": REGION, **KEYS, "role_arn": "arn"},
        "access_key_id and role_arn are mutually",
    ),
    "only a token": (
        {"region": REGION, "session_token": Secret(SECRET)},
        "session_token: requires access_key_id",
    ),
    "plain": ({"region": REGION, "sts_url": "http://u:hunter2@sts/"}, "sts_url: expected https"),
    "no host": ({"region": REGION, "sts_url": "https:///"}, "sts_url: .*missing host"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_signing_settings_are_rejected_by_their_field(mistake: str) -> None:
    given, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message) as caught:
        Sigv4Settings(**given)
    assert SECRET not in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("path", ["/a?b=c", "/a b", "/a%20b", "/ü", "/a/../b", "/a//b", "/./b"])
def test_an_address_that_is_sent_differently_from_how_it_is_signed_is_rejected(path: str) -> None:
    sigv4 = Sigv4Settings(region=REGION, **KEYS)
    RemoteWriteSettings(
        url="https://aps-workspaces.eu-central-1.amazonaws.com/workspaces/ws-1.2/api/v1/remote_write",
        sigv4=sigv4,
    )
    with pytest.raises(ValueError, match=r"url"):
        RemoteWriteSettings(url=f"https://receiver{path}", sigv4=sigv4)
    with pytest.raises(ValueError, match=r"sigv4 and username are mutually exclusive"):
        RemoteWriteSettings(sigv4=sigv4, username="u", password=Secret("p"))
