"""A web configuration in exporter-toolkit's format is read, and its mistakes are named."""

from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.service.web_config import read_web_config

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


def test_an_empty_file_asks_for_nothing(tmp_path: Path) -> None:
    config = read_web_config(written(tmp_path, "# nothing yet\n"))
    assert config.tls_server_config is None
    assert not config.basic_auth_users


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tls_server_config: {cert_file: a}", "missing required field `key_file`"),
        (TLS + "min_version: TLS10}", r"Invalid enum value 'TLS10' - at `$.tls_server_config.min"),
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
    with pytest.raises(UserError, match=r"http\.web_config_file: cannot read .*web\.yml"):
        read_web_config(tmp_path / "web.yml")


def test_a_hash_is_not_told_in_the_error(tmp_path: Path) -> None:
    file = written(tmp_path, "basic_auth_users: {bob: plain-password}")
    with pytest.raises(UserError) as caught:
        read_web_config(file)
    assert "plain-password" not in str(caught.value)
