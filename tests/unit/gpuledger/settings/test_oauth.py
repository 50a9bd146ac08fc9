"""OAUTHBEARER settings: invalid combinations are named with a remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import KafkaSettings, load_settings

LOGIN = {"SECURITY_PROTOCOL": "SASL_SSL", "SASL_MECHANISM": "OAUTHBEARER"}
SECRET = "hunter2"


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings with brokers."""

    kafka: KafkaSettings = KafkaSettings()


def load(folder: Path, **given: str) -> KafkaSettings:
    (folder / "secret").write_text(f"{SECRET}\n")
    environ = {
        f"GPULEDGER_KAFKA__{name}": value.replace("SECRET_FILE", str(folder / "secret"))
        for name, value in {**LOGIN, **given}.items()
    }
    found = load_settings(Model, prog="p", description="", options=[], argv=[], environ=environ)
    return found.kafka


CLIENT = {"OAUTH__CLIENT_ID": "c", "OAUTH__CLIENT_SECRET_FILE": "SECRET_FILE"}
URL = {"OAUTH__TOKEN_URL": "https://issuer.test/token"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "OAUTHBEARER needs oauth.token_file, or oauth.token_url with"),
        (URL, "OAUTH__TOKEN_URL: needs client_id and client_secret_file"),
        ({**URL, "OAUTH__TOKEN_FILE": "SECRET_FILE"}, "conflicts with token_file; set only one"),
        ({**CLIENT, "OAUTH__TOKEN_URL": "http://issuer.test"}, "expected https://"),
        ({**CLIENT, "OAUTH__TOKEN_URL": "https://"}, "OAUTH__TOKEN_URL: .*missing host"),
        (
            {**CLIENT, "OAUTH__TOKEN_URL": "https://u:hunter2@a/"},
            "must not contain a login or a fragment",
        ),
        (CLIENT, "OAUTH__CLIENT_ID: needs token_url too"),
        (
            {**URL, **CLIENT, "OAUTH__PARAMETERS": "{client_secret: hunter2}"},
            "OAUTH__PARAMETERS: reserved name client_secret",
        ),
        ({"OAUTH__TOKEN_FILE": "/nowhere"}, "OAUTH__TOKEN_FILE: cannot read"),
    ],
)
def test_settings_that_cannot_work_are_named_with_a_remedy_and_show_no_secret(
    tmp_path: Path, given: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        load(tmp_path, **given)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"OAUTH__TOKEN_FILE": "SECRET_FILE"},
        {**URL, **CLIENT, "OAUTH__SCOPE": "a b", "OAUTH__PARAMETERS": "{audience: kafka}"},
    ],
)
def test_a_token_needs_no_user_and_no_password(tmp_path: Path, given: dict[str, str]) -> None:
    found = load(tmp_path, **given)
    assert found.uses_tokens
    assert SECRET not in repr(found)
