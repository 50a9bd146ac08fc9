"""A web configuration in exporter-toolkit's format is read, and errors in it are named."""

from pathlib import Path

import pytest

from gpuledger.errors import UserError
from gpuledger.runtime.file_watch import FileWatch
from gpuledger.runtime.http.web_config import WebGuard, read_web_config
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
basic_auth_users:
  alice: {HASH}
"""
TLS = "tls_server_config: {cert_file: a, key_file: b, "


def written(folder: Path, text: str) -> Path:
    file = folder / "web.yml"
    file.write_text(text)
    return file


def test_all_supported_options_are_read_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    config = read_web_config(written(tmp_path, WHOLE))
    tls = config.tls_server_config
    assert tls is not None
    assert tls.cert_file == tmp_path / "server.pem"
    assert tls.key_file == Path("/keys/server.pem")
    assert tls.client_ca_file == tmp_path / "ca.pem"
    assert (tls.min_version, tls.client_auth_type) == ("TLS13", "RequireAndVerifyClientCert")
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
    ],
)
def test_a_file_that_protects_nothing_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, check=has_words("http.web_config_file", "web.yml")):
        read_web_config(written(tmp_path, text))


def test_a_file_that_is_emptied_leaves_the_old_users_in_force(tmp_path: Path) -> None:
    file = written(tmp_path, f"basic_auth_users: {{alice: {HASH}}}\n")
    check = Check()
    guard = WebGuard(file, check=check, watch=FileWatch([file], poll_interval_seconds=0))
    for text in ("", "# being written\n", "basic_auth_users: {}\n"):
        written(tmp_path, text)
        guard.look()
        assert check.has_failed
        assert "stays in force" in check.detail


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tls_server_config: {cert_file: a}", "missing required field `key_file`"),
        (TLS + "min_version: TLS11}", "min_version`; expected one of TLS12, TLS13"),
        (TLS + "client_auth_type: x}", "one of NoClientCert, VerifyClientCertIfGiven, Require"),
        (TLS + "curve_preferences: [X25519]}", "unknown field `curve_preferences`"),
        (TLS + "min_version: TLS13, max_version: TLS12}", "min_version is newer than max_version"),
        (TLS + "client_auth_type: VerifyClientCertIfGiven}", "client_ca_file must be set together"),
        (TLS + "client_ca_file: c}", "client_auth_type and client_ca_file must be set together"),
        (TLS + "client_allowed_sans: [c]}", "client_allowed_sans requires client_auth_type"),
        ("basic_auth_users: {bob: secret}", "basic_auth_users.bob: expected a bcrypt hash"),
        (
            f"basic_auth_users: {{bob: {HASH.replace('$10$', '$31$')}}}",
            "basic_auth_users.bob: expected a bcrypt hash, cost up to 16",
        ),
        ("http_server_config: {http2: true}", "unknown field `http_server_config`"),
        (
            "basic_auth_user: {}",
            "unknown field `basic_auth_user`; did you mean `basic_auth_users`?",
        ),
        (TLS + "min_versoin: TLS12}", "`$.tls_server_config`; did you mean `min_version`?"),
        ("tls_server_config: {cert_file: 5, key_file: b}", "cert_file"),
        ("- a", "Expected `object`, got `array`"),
        ("a: [", "invalid YAML"),
    ],
)
def test_an_error_names_the_file_and_the_field(tmp_path: Path, text: str, reason: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_web_config(file)
    assert str(file) in str(caught.value)
    assert reason in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=has_words("http.web_config_file", "web.yml")):
        read_web_config(tmp_path / "web.yml")


def test_a_password_hash_is_not_shown_in_the_error(tmp_path: Path) -> None:
    file = written(tmp_path, "basic_auth_users: {bob: plain-password}")
    with pytest.raises(UserError) as caught:
        read_web_config(file)
    assert "plain-password" not in str(caught.value)
