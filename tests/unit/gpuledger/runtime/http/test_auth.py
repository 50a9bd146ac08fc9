"""TLS and users protect the health pages, tested over real sockets on the loopback address."""

import asyncio
import base64
import datetime as dt
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import bcrypt
import pytest
from prometheus_client import REGISTRY

from gpuledger.errors import UserError
from gpuledger.runtime import CheckSeverity, Readiness, serve_health
from gpuledger.runtime.file_watch import FileWatch
from gpuledger.runtime.http.asgi import Receive, Scope, Send, respond
from gpuledger.runtime.http.web_config import WebGuard
from gpuledger.runtime.readiness import Check
from tests.errors import has_words
from tests.fakes.seconds import Seconds
from tests.real.services.certificates import Authority, KeyPair

HASH = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
USERS = f"basic_auth_users: {{alice: {HASH}}}\n"
ALICE = "alice:right"
TLS = "tls_server_config: {cert_file: server.pem, key_file: server-key.pem%s}\n"
CLIENTS = ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.pem"
HANDSHAKE = (aiohttp.ClientError, ssl.SSLError, OSError)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    authority = Authority(folder=tmp_path)
    authority.issue("server")
    return authority


async def page(_: Scope, __: Receive, send: Send) -> None:
    await respond(send, b"page")


@asynccontextmanager
async def serving(folder: Path, text: str) -> AsyncIterator[str]:
    file = folder / "web.yml"
    file.write_text(text)
    guard = WebGuard(file, check=Check(), watch=FileWatch([file], poll_interval_seconds=0))
    scheme = "https" if text.startswith("tls") else "http"
    async with serve_health(
        listen="127.0.0.1:0", readiness=Readiness(), guard=guard, others=page
    ) as address:
        yield f"{scheme}://{address}"


def trusting(
    authority: Authority,
    *,
    shown: KeyPair | None = None,
    version: ssl.TLSVersion | None = None,
) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if shown:
        context.load_cert_chain(shown.certificate, shown.key)
    if version:
        context.minimum_version = context.maximum_version = version
    return context


async def get(
    url: str, *, tls: ssl.SSLContext | None = None, auth: str | None = None
) -> tuple[int, dict[str, str]]:
    headers = {"Authorization": f"Basic {base64.b64encode(auth.encode()).decode()}"} if auth else {}
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, ssl=tls or True, headers=headers) as response,
    ):
        await response.read()
        return response.status, dict(response.headers)


@pytest.mark.parametrize(
    ("page", "auth", "status"),
    [
        ("/metrics", ALICE, 200),
        ("/metrics", None, 401),
        ("/metrics", "alice:wrong", 401),
        ("/metrics", "bob:right", 401),
        ("/of-the-component", None, 401),
        ("/of-the-component?metrics", "alice:wrong", 401),
        ("/of-the-component", ALICE, 200),
        ("/livez", None, 200),
        ("/health", None, 200),
        ("/readyz", None, 503),
    ],
)
async def test_metrics_require_a_user_and_probes_do_not(
    tmp_path: Path, page: str, auth: str | None, status: int
) -> None:
    async with serving(tmp_path, USERS) as url:
        found, headers = await get(url + page, auth=auth)
    assert found == status
    assert ("WWW-Authenticate" in headers) == (status == 401)


async def test_clients_that_must_wait_for_a_password_check_learn_when_to_retry(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, USERS) as url:
        found = await asyncio.gather(
            *(get(f"{url}/metrics", auth=f"alice:wrong {number}") for number in range(24))
        )
    assert {status for status, _ in found} == {401, 503}
    assert all(("Retry-After" in headers) == (status == 503) for status, headers in found)


ODD_LOGINS = [
    "Basic \u00e9\u00e9\u00e9",
    "Basic \xff",
    "Basic ====",
    "Basic YQ",
    "Basic " + base64.b64encode(b"\xff\xfe:right").decode(),
    "Basic " + base64.b64encode(b"alice:\0").decode(),
    "Basic " + base64.b64encode(b"alice:" + b"x" * 5000).decode(),
    "Basic " + base64.b64encode(b"alice").decode(),
    "Basic",
    "basic ",
    "Bearer right",
    "\u00e9",
    "",
]


@pytest.mark.parametrize("login", ODD_LOGINS)
async def test_a_malformed_login_is_refused_like_a_wrong_one(tmp_path: Path, login: str) -> None:
    lines = f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: {login}\r\n\r\n"
    async with serving(tmp_path, USERS) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(lines.encode("latin-1"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 401 ")
        writer.close()


@pytest.mark.parametrize(
    ("offered", "spoken", "is_understood"),
    [
        ("", ssl.TLSVersion.TLSv1_2, True),
        ("", ssl.TLSVersion.TLSv1_3, True),
        (", min_version: TLS13", ssl.TLSVersion.TLSv1_2, False),
        (", min_version: TLS13", ssl.TLSVersion.TLSv1_3, True),
        (", max_version: TLS12", ssl.TLSVersion.TLSv1_3, False),
    ],
)
async def test_only_the_configured_tls_versions_are_accepted(
    tmp_path: Path,
    authority: Authority,
    offered: str,
    spoken: ssl.TLSVersion,
    *,
    is_understood: bool,
) -> None:
    async with serving(tmp_path, TLS % offered) as url:
        requested = get(url + "/metrics", tls=trusting(authority, version=spoken))
        if is_understood:
            assert (await requested)[0] == 200
        else:
            with pytest.raises(HANDSHAKE):
                await requested


async def test_a_client_must_show_its_certificate_except_for_probes(
    tmp_path: Path, authority: Authority
) -> None:
    client = authority.issue("prometheus")
    async with serving(tmp_path, TLS % CLIENTS) as url:
        assert (await get(url + "/metrics", tls=trusting(authority, shown=client)))[0] == 200
        assert (await get(url + "/metrics", tls=trusting(authority)))[0] == 403
        assert (await get(url + "/livez", tls=trusting(authority)))[0] == 200


async def test_an_expired_or_unknown_certificate_is_refused(
    tmp_path: Path, authority: Authority
) -> None:
    expired = authority.issue("expired", lifetime=dt.timedelta(minutes=-5))
    stranger = Authority(folder=tmp_path / "other").issue("stranger")
    async with serving(tmp_path, TLS % CLIENTS) as url:
        for shown in (expired, stranger):
            with pytest.raises(HANDSHAKE):
                await get(url + "/metrics", tls=trusting(authority, shown=shown))


async def test_a_client_must_have_one_of_the_allowed_names(
    tmp_path: Path, authority: Authority
) -> None:
    shown = trusting(authority, shown=authority.issue("prometheus"))
    for names, status in (("[localhost]", 200), ("[elsewhere]", 403)):
        text = TLS % f"{CLIENTS}, client_allowed_sans: {names}"
        async with serving(tmp_path, text) as url:
            assert (await get(url + "/metrics", tls=shown))[0] == status


async def test_new_certificates_and_ca_certificates_are_used_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    old_client = authority.issue("old")
    async with serving(tmp_path, TLS % CLIENTS) as url:
        assert (await get(url + "/metrics", tls=trusting(authority, shown=old_client)))[0] == 200
        new = Authority(folder=tmp_path / "new")
        pair, client = new.issue("server"), new.issue("new")
        shutil.copy(pair.key, tmp_path / "server-key.pem")
        shutil.copy(pair.certificate, tmp_path / "server.pem")
        shutil.copy(new.certificate, tmp_path / "ca.pem")
        assert (await get(url + "/metrics", tls=trusting(new, shown=client)))[0] == 200
        with pytest.raises(HANDSHAKE):
            await get(url + "/metrics", tls=trusting(new, shown=old_client))


@pytest.mark.parametrize("first", ["", ", min_version: TLS12"])
async def test_a_new_minimum_tls_version_is_used_without_a_restart(
    tmp_path: Path, authority: Authority, first: str
) -> None:
    old = trusting(authority, version=ssl.TLSVersion.TLSv1_2)
    async with serving(tmp_path, TLS % first) as url:
        assert (await get(url + "/metrics", tls=old))[0] == 200
        (tmp_path / "web.yml").write_text(TLS % ", min_version: TLS13")
        with pytest.raises(HANDSHAKE):
            await get(url + "/metrics", tls=old)
        assert (await get(url + "/metrics", tls=trusting(authority)))[0] == 200


async def test_a_change_of_client_authentication_is_used_without_a_restart(
    tmp_path: Path, authority: Authority
) -> None:
    shown = trusting(authority, shown=authority.issue("prometheus"))
    async with serving(tmp_path, TLS % "") as url:
        assert (await get(url + "/metrics", tls=trusting(authority)))[0] == 200
        (tmp_path / "web.yml").write_text(TLS % CLIENTS)
        assert (await get(url + "/metrics", tls=trusting(authority)))[0] == 403
        assert (await get(url + "/metrics", tls=shown))[0] == 200
        (tmp_path / "web.yml").write_text(TLS % CLIENTS.replace("Require", "x", 1))
        assert (await get(url + "/metrics", tls=trusting(authority)))[0] == 403


async def test_a_connection_from_before_a_change_is_closed_if_it_lacks_a_certificate(
    tmp_path: Path, authority: Authority
) -> None:
    shown = trusting(authority, shown=authority.issue("prometheus"))
    async with serving(tmp_path, TLS % "") as url, aiohttp.ClientSession() as session:
        statuses = []
        for text in (TLS % "", TLS % CLIENTS, TLS % CLIENTS):
            (tmp_path / "web.yml").write_text(text)
            async with session.get(f"{url}/metrics", ssl=shown) as response:
                await response.read()
                statuses.append(response.status)
    assert statuses == [200, 403, 200]


@pytest.mark.parametrize("kind", ["VerifyClientCertIfGiven", "RequireAndVerifyClientCert"])
async def test_a_name_that_is_not_allowed_is_refused_whenever_a_certificate_is_shown(
    tmp_path: Path, authority: Authority, kind: str
) -> None:
    shown = trusting(authority, shown=authority.issue("prometheus"))
    requested = f", client_auth_type: {kind}, client_ca_file: ca.pem"
    for names, status in (("[localhost]", 200), ("[127.0.0.1]", 200), ("[elsewhere]", 403)):
        text = TLS % f"{requested}, client_allowed_sans: {names}"
        async with serving(tmp_path, text) as url:
            assert (await get(url + "/metrics", tls=shown))[0] == status
            without = 403 if kind.startswith("Require") else 200
            assert (await get(url + "/metrics", tls=trusting(authority)))[0] == without
            assert (await get(url + "/livez", tls=shown))[0] == 200


async def test_an_incomplete_change_leaves_the_old_certificate_in_force(
    tmp_path: Path, authority: Authority
) -> None:
    async with serving(tmp_path, TLS % "") as url:
        (tmp_path / "server.pem").write_text("half")
        assert (await get(url + "/livez", tls=trusting(authority)))[0] == 200


async def test_new_users_are_accepted_without_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, USERS) as url:
        assert (await get(url + "/metrics"))[0] == 401
        (tmp_path / "web.yml").write_text(USERS.replace("alice", "bob"))
        assert (await get(url + "/metrics", auth="bob:right"))[0] == 200
        assert (await get(url + "/metrics", auth=ALICE))[0] == 401


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("tls_server_config: {cert_file: no.pem, key_file: server-key.pem}", "cert_file"),
        ("tls_server_config: {cert_file: server.pem, key_file: no.pem}", "key_file"),
        ("tls_server_config: {cert_file: server.pem, key_file: ca.pem}", "key_file"),
        (TLS % CLIENTS.replace("ca.pem", "no.pem"), "client_ca_file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_by_its_field(
    tmp_path: Path, authority: Authority, text: str, field: str
) -> None:
    (tmp_path / "web.yml").write_text(text)
    with pytest.raises(UserError, check=has_words(f"tls_server_config.{field}")):
        WebGuard(tmp_path / "web.yml", check=Check())


def test_an_invalid_file_and_its_repair_are_reported_even_without_requests(tmp_path: Path) -> None:
    file, clock = tmp_path / "web.yml", Seconds()
    file.write_text(USERS)
    check = Readiness().check("web_config", severity=CheckSeverity.WARNING)
    guard = WebGuard(file, check=check, watch=FileWatch([file], monotonic=clock))
    assert check.is_ok
    file.write_text("basic_auth_users: {alice: right}\n")
    clock.advance(1)
    guard.look()
    assert check.has_failed
    assert "basic_auth_users.alice" in check.detail
    file.write_text(USERS)
    clock.advance(1)
    guard.look()
    assert check.is_ok


def test_an_expired_server_certificate_is_reported_with_name_and_date(
    tmp_path: Path, authority: Authority
) -> None:
    authority.issue("server", lifetime=dt.timedelta(minutes=-5))
    (tmp_path / "web.yml").write_text(TLS % "")
    check = Readiness().check("web_config", severity=CheckSeverity.WARNING)
    assert WebGuard(tmp_path / "web.yml", check=check).context()
    assert check.detail.startswith("tls_server_config.cert_file: the certificate of 'server' in ")
    assert " expired on 20" in check.detail
    labels = {"file": str(tmp_path / "server.pem")}
    name = "gpuledger_certificate_not_after_timestamp_seconds"
    assert REGISTRY.get_sample_value(name, labels)


async def test_a_file_named_by_a_rejected_configuration_is_used_once_it_exists(
    tmp_path: Path, authority: Authority
) -> None:
    new = Authority(folder=tmp_path / "new")
    async with serving(tmp_path, TLS % "") as url:
        (tmp_path / "web.yml").write_text(
            TLS.replace("server.pem", "next.pem").replace("server-key", "next-key") % ""
        )
        assert (await get(url + "/livez", tls=trusting(authority)))[0] == 200
        pair = new.issue("next")
        shutil.copy(pair.key, tmp_path / "next-key.pem")
        shutil.copy(pair.certificate, tmp_path / "next.pem")
        assert (await get(url + "/livez", tls=trusting(new)))[0] == 200
