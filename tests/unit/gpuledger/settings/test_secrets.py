"""Secrets come from variables, the settings file or files of their own, and are never shown."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuledger.errors import SettingsError
from gpuledger.settings import KafkaSettings, Secret, load_settings


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kafka: KafkaSettings = KafkaSettings()
    token: Secret | None = None


def load(*argv: str, **variables: str) -> Settings:
    environ = {f"GPULEDGER_{name}": value for name, value in variables.items()}
    return load_settings(Settings, prog="p", description="d", argv=argv, environ=environ)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    return file


def test_several_secrets_come_from_files_without_their_last_newline(
    tmp_path: Path, secret_file: Path
) -> None:
    other = tmp_path / "other"
    other.write_text(" a b \r\n")

    loaded = load(KAFKA__SASL_PASSWORD_FILE=str(secret_file), TOKEN_FILE=str(other))

    assert loaded.kafka.sasl_password == Secret("hunter2")
    assert loaded.token == Secret(" a b ")


def test_a_settings_file_names_secret_files_too(tmp_path: Path, secret_file: Path) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(f"kafka: {{sasl_password_file: {secret_file}}}\ntoken: plain\n")

    loaded = load("--config", str(config))

    assert loaded.kafka.sasl_password == Secret("hunter2")
    assert loaded.token == Secret("plain")


def test_a_variable_wins_over_the_secret_file_of_the_settings_file(
    tmp_path: Path, secret_file: Path
) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(f"token_file: {secret_file}\n")

    assert load("--config", str(config), TOKEN="other").token == Secret("other")


def test_a_secret_given_twice_in_one_source_is_refused(secret_file: Path) -> None:
    with pytest.raises(SettingsError, match="GPULEDGER_TOKEN and GPULEDGER_TOKEN_FILE: give only"):
        load(TOKEN="x", TOKEN_FILE=str(secret_file))


BROKEN_FILES: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder / "none", "No such file or directory"),
    (lambda folder: folder, "Is a directory"),
    (lambda folder: written(folder / "empty", b"\n"), "is empty"),
    (lambda folder: written(folder / "binary", b"\xff\xfe"), "not a text file"),
]


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(("make", "said"), BROKEN_FILES)
def test_a_secret_file_that_cannot_be_used_is_named(
    tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    file = make(tmp_path)

    with pytest.raises(SettingsError) as raised:
        load(TOKEN_FILE=str(file))

    assert "GPULEDGER_TOKEN_FILE" in str(raised.value)
    assert str(file) in str(raised.value)
    assert said in str(raised.value)


def test_an_unknown_secret_file_variable_gets_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"mean GPULEDGER_KAFKA__SASL_PASSWORD_FILE\?"):
        load(KAFKA_SASL_PASSWORD_FILE="/x")


def test_a_secret_of_a_wrong_type_is_not_shown_in_the_error(tmp_path: Path) -> None:
    config = tmp_path / "s.yaml"
    config.write_text("token: 123456\n")

    with pytest.raises(SettingsError) as raised:
        load("--config", str(config))

    assert "expected a text, got ********" in str(raised.value)
    assert "123456" not in str(raised.value)


@pytest.mark.parametrize("show", [str, repr, "{}".format, "{!r}".format, lambda s: f"{[s]}"])
def test_a_secret_shows_a_mask_and_reveals_only_when_asked(show: Callable[[Secret], str]) -> None:
    secret = Secret("hunter2")

    assert "hunter2" not in show(secret)
    assert "********" in show(secret)
    assert secret.reveal() == "hunter2"


def test_secrets_are_compared_by_their_text() -> None:
    assert Secret("a") == Secret("a")
    assert hash(Secret("a")) == hash(Secret("a"))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"
