"""Secrets come from variables, the settings file or files of their own, and are never shown."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml

from gpuledger.errors import SettingsError
from gpuledger.settings import KafkaSettings, Secret, load_settings
from gpuledger.settings.secret import MASK, mask_address, mask_addresses
from tests.errors import has_words


class Receiver(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "http://localhost"
    urls: list[str] = []
    headers: dict[str, str] = {}
    ports: list[int] = []

    def __post_init__(self) -> None:
        for url in [self.url, *self.urls]:
            if not url.startswith("http://"):
                raise ValueError(f"url {url!r} must begin with http://, not {url}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kafka: KafkaSettings = KafkaSettings()
    token: Secret | None = None
    receiver: Receiver = Receiver()


def load(*argv: str, **variables: str) -> Settings:
    environ = {f"GPULEDGER_{name}": value for name, value in variables.items()}
    return load_settings(Settings, prog="p", description="d", argv=argv, environ=environ)


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("hunter2\n")
    return file


def test_secrets_are_read_from_files_without_their_last_newline(
    tmp_path: Path, secret_file: Path
) -> None:
    other = tmp_path / "other"
    other.write_text(" a b \r\n")

    loaded = load(KAFKA__SASL_PASSWORD_FILE=str(secret_file), TOKEN_FILE=str(other))

    assert loaded.kafka.sasl_password == Secret("hunter2")
    assert loaded.token == Secret(" a b ")


def test_a_settings_file_can_name_secret_files_too(tmp_path: Path, secret_file: Path) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(f"kafka: {{sasl_password_file: {secret_file}}}\ntoken: plain\n")

    loaded = load("--config", str(config))

    assert loaded.kafka.sasl_password == Secret("hunter2")
    assert loaded.token == Secret("plain")


def test_a_variable_overrides_the_secret_file_of_the_settings_file(
    tmp_path: Path, secret_file: Path
) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(f"token_file: {secret_file}\n")

    assert load("--config", str(config), TOKEN="other").token == Secret("other")


def test_a_secret_given_twice_in_one_source_is_refused(secret_file: Path) -> None:
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_TOKEN ", "GPULEDGER_TOKEN_FILE")):
        load(TOKEN="x", TOKEN_FILE=str(secret_file))


BROKEN_FILES: list[tuple[Callable[[Path], Path], str]] = [
    (lambda folder: folder, "Is a directory"),
    (lambda folder: written(folder / "empty", b"\n"), "is empty"),
    (lambda folder: written(folder / "binary", b"\xff\xfe"), "not a text file"),
    (lambda folder: written(folder / "two", b"hunter2\nhunter3\n"), "more than one line"),
    (lambda folder: written(folder / "old-mac", b"hunter2\rhunter3"), "more than one line"),
    (lambda folder: written(folder / "nul", b"hunter2\0\n"), "NUL"),
    (lambda folder: written(folder / "windows", b"\xef\xbb\xbfhunter2"), "byte order mark"),
]


def written(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


def test_an_invalid_file_name_is_an_error_of_the_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_TOKEN_FILE")):
        load(TOKEN_FILE=str(tmp_path / "nul-in-name\0"))


@pytest.mark.parametrize(("make", "message"), BROKEN_FILES)
def test_a_secret_file_that_cannot_be_read_is_named(
    tmp_path: Path, make: Callable[[Path], Path], message: str
) -> None:
    file = make(tmp_path)

    with pytest.raises(SettingsError) as raised:
        load(TOKEN_FILE=str(file))

    assert "GPULEDGER_TOKEN_FILE" in str(raised.value)
    assert str(file) in str(raised.value)
    assert message in str(raised.value)
    assert "hunter" not in str(raised.value)


@pytest.mark.parametrize(
    "given", ["my-real-password", "/hunter2/+a=", "hun\0ter2", "hunter2" * 50, "hunter2/x"]
)
def test_a_secret_given_in_place_of_its_file_name_is_not_shown(tmp_path: Path, given: str) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(yaml.safe_dump({"kafka": {"sasl_password_file": given}}))
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_TOKEN_FILE")) as of_variable:
        load(TOKEN_FILE=given)
    with pytest.raises(SettingsError, check=has_words("kafka.sasl_password_file")) as of_key:
        load("--config", str(config))
    assert given[:6] not in f"{of_variable.value} {of_key.value}"


def test_an_unknown_secret_file_variable_gets_the_closest_name_suggested() -> None:
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_KAFKA__SASL_PASSWORD_FILE")):
        load(KAFKA_SASL_PASSWORD_FILE="/x")


def test_a_secret_of_a_wrong_type_is_not_shown_in_the_error(tmp_path: Path) -> None:
    config = tmp_path / "s.yaml"
    config.write_text("token: 123456\n")

    with pytest.raises(SettingsError) as raised:
        load("--config", str(config))

    assert "expected a text, got a number: put it in quotes" in str(raised.value)
    assert "123456" not in str(raised.value)


@pytest.mark.parametrize("show", [str, repr, "{}".format, "{!r}".format, lambda s: f"{[s]}"])
def test_a_secret_shows_a_mask_and_reveals_its_text_only_on_request(
    show: Callable[[Secret], str],
) -> None:
    secret = Secret("hunter2")

    assert "hunter2" not in show(secret)
    assert "********" in show(secret)
    assert secret.reveal() == "hunter2"


def test_secrets_are_compared_by_their_text() -> None:
    assert Secret("a") == Secret("a")
    assert hash(Secret("a")) == hash(Secret("a"))
    assert Secret("a") != Secret("b")
    assert Secret("a") != "a"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RECEIVER__URL": "usr:hunter2@host:9090/w"}, "'********' must begin"),
        ({"RECEIVER__URL": "usr:hun ter2'@host/w"}, "must begin with http://, not ********"),
        ({"RECEIVER__URL": "ftp://usr:a/hunter2@host"}, "'********' must begin"),
        ({"RECEIVER__URL": "ftp://host/w?token=hunter2"}, "'ftp://host/w' must begin"),
        ({"RECEIVER__URLS": "http://a,usr:hunter2@b"}, "'********' must begin"),
        (
            {"RECEIVER__HEADERS": "Authorization=Bearer hunter2"},
            "HEADERS: expected a mapping, {",
        ),
        ({"RECEIVER__HEADERS": "{X: hunter2: x}"}, "HEADERS: expected a mapping, {"),
        ({"RECEIVER__PORTS": "usr:hunter2@host"}, "got '********'"),
    ],
)
def test_an_error_names_the_setting_and_masks_its_value(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        load(**variables)

    assert "hunter2" not in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kafka: {sasl_password: hunter2: x}", "(line 1, column "),
        ("token: a\nkafka:\n  sasl_password: hunter2: x", "not allowed here (line 3, column "),
        ("token: *hunter2", "found undefined alias ********"),
        ("token: !hunter2 x", "for the tag ********"),
        ("kafka: sasl_password=hunter2", "kafka in "),
        ("- hunter2", "got a list"),
        ("receiver: {headers: [hunter2]}", "receiver.headers in "),
        ("receiver: {url: [hunter2]}\nkafka: {sasl_password: [hunter2]}", "kafka.sasl_password in"),
    ],
)
def test_no_part_of_an_invalid_settings_file_is_shown(
    tmp_path: Path, text: str, message: str
) -> None:
    config = tmp_path / "s.yaml"
    config.write_text(text)

    with pytest.raises(SettingsError) as raised:
        load("--config", str(config))

    assert "hunter2" not in str(raised.value)
    assert message in str(raised.value)


def test_an_unknown_option_is_named_without_its_password() -> None:
    with pytest.raises(SettingsError) as raised:
        load("--url", "http://usr:hunter2@host")

    assert "hunter2" not in str(raised.value)


def test_the_printed_settings_mask_secrets_in_an_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = "http://a/w?token=hunter2,http://usr:hunter2#@b,http://c/@x"
    with pytest.raises(SystemExit):
        load("--print-config", RECEIVER__URLS=urls)
    shown = capsys.readouterr().out

    assert "hunter2" not in shown
    assert yaml.safe_load(shown)["receiver"]["urls"] == [
        "http://a/w",
        "********",
        "********",
    ]


@pytest.mark.parametrize(
    ("address", "masked"),
    [
        ("http://host:9090/w", "http://host:9090/w"),
        ("http://usr:hunter2@host:9090/w", "http://host:9090/w"),
        ("http://hunter2@host/w", "http://host/w"),
        ("http://u:hunter2@host?a=hunter2", "http://host"),
        ("http://host/w#hunter2", "http://host/w"),
        ("http://usr:hunter2#pw@host/w", MASK),
        ("http://usr:hunter2/pw@host/w", MASK),
        ("usr:hunter2@host:9090/w", MASK),
        ("http://a,http://u:hunter2@b", MASK),
        ("localhost:9092,other:9092", "localhost:9092,other:9092"),
        ("/var/lib/a?b#c", "/var/lib/a?b#c"),
    ],
)
@pytest.mark.parametrize("around", ["{}", "at '{}': refused", '{{"url":"{}","to":"x"}}', "a {} b"])
def test_an_address_is_masked_in_a_value_and_in_a_text(
    address: str, masked: str, around: str
) -> None:
    assert mask_address(address) == masked
    assert mask_addresses(around.format(address)) == around.format(masked)


def test_a_secret_that_a_comma_or_a_colon_splits_is_not_shown_even_in_part() -> None:
    for variable, given in (
        ("RECEIVER__PORTS", "usr:hun,ter2@host"),
        ("RECEIVER__PORTS", "[usr:hun,ter2@host]"),
        ("RECEIVER__HEADERS", "{usr:hun: [ter2@host], hun: [1]}"),
    ):
        with pytest.raises(SettingsError) as raised:
            load(**{variable: given})
        assert "hun" not in str(raised.value).partition(": ")[2], given
        assert "ter2" not in str(raised.value), given
