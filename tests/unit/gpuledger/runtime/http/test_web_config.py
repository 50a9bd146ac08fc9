"""A web configuration in exporter-toolkit's format is read, and its mistakes are named."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.runtime.http.exchange import HttpRequest, Response
from gpuledger.runtime.http.health_pages import WebGuard
from gpuledger.runtime.http.web_config import read_web_config, refuse_loss
from gpuledger.runtime.readiness import Check
from tests.errors import has_words

HASH = "$2y$10$KakQXgis27HqBQrOjKgWReS8eFjYfvy6bEz79sFSOTnCMcrX8eN6O"
WHOLE = f"""
tls_server_config:
  cert_file: server.pem
  key_file: /keys/server.pem
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: ca.pem
  client_allowed_sans: [prometheus]
  min_version: TLS13
  max_version: TLS13
  cipher_suites: [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]
  prefer_server_cipher_suites: false
http_server_config:
  http2: false
  headers: {{X-Frame-Options: deny}}
basic_auth_users:
  alice: {HASH}
"""
TLS = "tls_server_config: {cert_file: a, key_file: b, "


def written(folder: Path, text: str) -> Path:
    file = folder / "web.yml"
    file.write_text(text)
    return file


def test_all_that_is_offered_is_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = read_web_config(written(tmp_path, WHOLE))
    tls = config.tls_server_config
    assert tls is not None
    assert tls.cert_file == str(tmp_path / "server.pem")
    assert tls.key_file == "/keys/server.pem"
    assert tls.client_ca_file == str(tmp_path / "ca.pem")
    assert (tls.min_version, tls.requires_clients) == ("TLS13", True)
    assert config.http_server_config.headers == {"X-Frame-Options": "deny"}
    assert config.basic_auth_users == {"alice": HASH}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing yet\n",
        "---\n",
        "{}\n",
        "basic_auth_users: {}\n",
        "tls_server_config:\n",
        "http_server_config: {headers: {X-Frame-Options: deny}}\n",
    ],
)
def test_a_file_that_protects_nothing_is_a_mistake(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UserError, check=has_words("http.web_config_file")):
        read_web_config(file)
    with pytest.raises(UserError, check=has_words("web.yml")):
        WebGuard(file)


async def test_a_file_that_is_emptied_leaves_the_old_users_in_force(tmp_path: Path) -> None:
    file = written(tmp_path, f"basic_auth_users: {{alice: {HASH}}}\n")
    check = Check()
    guard = WebGuard(file, poll_interval_seconds=0, check=check)
    for text in ("", "# being written\n", "basic_auth_users: {}\n"):
        written(tmp_path, text)
        request = HttpRequest(method="GET", path="/metrics", headers={})
        answer = await guard.answer(request, _page)
        assert answer.status == 401
        assert check.has_failed


USERS = f"basic_auth_users: {{alice: {HASH}}}\n"
OPEN = "tls_server_config: {cert_file: a, key_file: b}\n"
ASKS = OPEN.replace("}", ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: c}")


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [
        (USERS, OPEN, True),
        (ASKS, OPEN, True),
        (OPEN + USERS, OPEN, True),
        (ASKS + USERS, USERS, False),
        (ASKS + USERS, ASKS, False),
        (USERS, ASKS, False),
        (OPEN, OPEN, False),
        (OPEN, USERS, False),
    ],
)
def test_a_change_by_which_nobody_is_asked_any_more_is_refused(
    tmp_path: Path, before: str, after: str, *, is_refused: bool
) -> None:
    first = read_web_config(written(tmp_path, before))
    second = read_web_config(written(tmp_path, after))
    with pytest.raises(UserError) if is_refused else nullcontext():
        refuse_loss(first, second)


async def _page(_: HttpRequest) -> Response:
    return Response(status=200, body=b"")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tls_server_config: {cert_file: a}", "missing required field `key_file`"),
        (TLS + "min_version: TLS10}", r"Invalid enum value 'TLS10' - at `$.tls_server_config.min"),
        (TLS + "min_version: TLS11}", "min_version`; expected one of TLS12, TLS13"),
        (TLS + "client_auth_type: x}", "one of NoClientCert, VerifyClientCertIfGiven, Require"),
        ("http_server_config: {headers: {Server: x}}", "one of Content-Security-Policy, Strict"),
        (TLS + "curve_preferences: [X25519]}", "tls_server_config.curve_preferences: Python can"),
        (TLS + "cert: PEM}", "tls_server_config.cert: give the certificate in a file, cert_file"),
        (TLS + "min_version: TLS13, max_version: TLS12}", "min_version is newer than max_version"),
        (TLS + "client_auth_type: RequireAnyClientCert}", "Invalid enum value 'RequireAnyClient"),
        (TLS + "client_auth_type: VerifyClientCertIfGiven}", "needs client_ca_file"),
        (TLS + "client_ca_file: c}", "client_ca_file is without effect"),
        (TLS + "client_allowed_sans: [c]}", "client_allowed_sans is without effect"),
        ("basic_auth_users: {bob: secret}", "basic_auth_users.bob: expected a bcrypt hash"),
        (
            f"basic_auth_users: {{bob: {HASH.replace('$10$', '$31$')}}}",
            "basic_auth_users.bob: cost 31 would take minutes",
        ),
        ("rate_limit: {interval: 1s}", "rate_limit: requests are not limited by rate"),
        ("tls_config: {}", "Object contains unknown field `tls_config`"),
        (
            "basic_auth_user: {}",
            "unknown field `basic_auth_user`; did you mean `basic_auth_users`?",
        ),
        (TLS + "min_versoin: TLS12}", "`$.tls_server_config`; did you mean `min_version`?"),
        ("http_server_config: {headers: {Server: x}}", "Invalid enum value 'Server'"),
        (
            'http_server_config: {headers: {X-Frame-Options: "deny\\r\\nX: y"}}',
            "http_server_config.headers.X-Frame-Options: 'deny\\r\\nX: y' holds what no header may",
        ),
        ("http_server_config: {headers: {X-Frame-Options: \u00e9}}", "what is not ASCII"),
        ("- a", "Expected `object`, got `array`"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_mistake_is_named_by_file_and_field(tmp_path: Path, text: str, reason: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_web_config(file)
    assert str(file) in str(caught.value)
    assert reason in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=has_words("http.web_config_file", "web.yml")):
        read_web_config(tmp_path / "web.yml")


def test_a_hash_is_not_told_in_the_error(tmp_path: Path) -> None:
    file = written(tmp_path, "basic_auth_users: {bob: plain-password}")
    with pytest.raises(UserError) as caught:
        read_web_config(file)
    assert "plain-password" not in str(caught.value)
