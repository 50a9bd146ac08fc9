"""Settings are loaded in a fixed order, and an error names the place, value and remedy."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import yaml

from gpuledger.errors import SettingsError
from gpuledger.settings import (
    HttpSettings,
    KafkaSettings,
    LogSettings,
    Option,
    Secret,
    load_settings,
)
from tests.errors import has_words


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    seconds: float = 1.0


class Watch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch."""
    resources: Annotated[tuple[str, ...], msgspec.Meta(max_length=3)] = ()
    urls: tuple[str, ...] = ()
    costs: dict[str, float] = {}
    headers: dict[str, str] = {}
    rules: list[Rule] = []
    token: Secret | None = None
    """Token to log in with."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kafka: KafkaSettings = KafkaSettings(client_id="watcher")
    http: HttpSettings = HttpSettings(listen="0.0.0.0:9821")
    log: LogSettings = LogSettings()
    watch: Watch = Watch()
    sampling_interval_seconds: float = 1.0
    """Length of a tick: 100 % of it is covered."""
    ticks: int | None = None
    """How many ticks."""
    kind: Literal["one", "two"] = "one"


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node_name: str
    """Name of the node."""


OPTIONS = (
    Option(name="--tick", setting="sampling_interval_seconds", help="length of a tick"),
    Option(name="kind", setting="kind", help="what to run", choices=("one", "two")),
)
COMMON = ("sampling_interval_seconds", "kafka.client_id", "ticks", "watch.costs")


def load(*argv: str, **variables: str) -> Settings:
    """Load as a component would; variables without their prefix."""
    return load_settings(
        Settings,
        prog="watcher",
        description="Watches.",
        options=OPTIONS,
        examples=["watcher --tick 2"],
        common=COMMON,
        argv=argv,
        environ={"HOME": "/", **{f"GPULEDGER_{name}": text for name, text in variables.items()}},
    )


def load_file(file: Path, text: str, *argv: str, **variables: str) -> Settings:
    file.write_text(text)
    return load(*argv, "--config", str(file), **variables)


def test_without_any_input_the_defaults_of_the_component_apply() -> None:
    assert load() == Settings()


def test_a_group_given_in_part_keeps_the_components_other_defaults() -> None:
    loaded = load(KAFKA__REQUEST_TIMEOUT_SECONDS="5")

    assert loaded.kafka == KafkaSettings(client_id="watcher", request_timeout_seconds=5.0)


def test_a_variable_overrides_the_file_and_an_option_overrides_both(tmp_path: Path) -> None:
    file, text = tmp_path / "s.yaml", "sampling_interval_seconds: 2\nkind: two\nticks: 7\n"

    assert load_file(file, text).sampling_interval_seconds == 2.0
    assert load_file(file, text, SAMPLING_INTERVAL_SECONDS="3").sampling_interval_seconds == 3.0
    both = load_file(file, text, "--tick", "4", "one", SAMPLING_INTERVAL_SECONDS="3")
    assert (both.sampling_interval_seconds, both.kind, both.ticks) == (4.0, "one", 7)


def test_variables_are_parsed_as_numbers_lists_and_mappings() -> None:
    loaded = load(
        TICKS="12",
        KAFKA__SSL_CHECK_HOSTNAME="false",
        KAFKA__SSL_CA_FILE="/ca.pem",
        WATCH__NAMESPACES="a, b",
        WATCH__RESOURCES="c,d",
        WATCH__COSTS='{"h100": 2.5}',
        WATCH__RULES="[{name: x, seconds: 2}]",
    )

    assert loaded.ticks == 12
    assert loaded.kafka.ssl_check_hostname is False
    assert loaded.kafka.ssl_ca_file == Path("/ca.pem")
    assert loaded.watch == Watch(
        namespaces=("a", "b"),
        resources=("c", "d"),
        costs={"h100": 2.5},
        rules=[Rule(name="x", seconds=2.0)],
    )


@pytest.mark.parametrize("text", ["null", "007", "true", ""])
def test_a_variable_for_a_text_setting_is_kept_as_it_is(text: str) -> None:
    assert load(KAFKA__SASL_USERNAME=text).kafka.sasl_username == text


def test_an_empty_group_in_the_file_means_its_defaults(tmp_path: Path) -> None:
    assert load_file(tmp_path / "s.yaml", "kafka:\nwatch:\n") == Settings()
    assert load_file(tmp_path / "s.yaml", "") == Settings()


@pytest.mark.parametrize("none", ["null", "''"])
@pytest.mark.parametrize("name", ["group_instance_id", "sasl_username", "ssl_ca_file"])
def test_null_or_an_empty_text_sets_none_if_the_default_is_none(
    tmp_path: Path, name: str, none: str
) -> None:
    assert load_file(tmp_path / "s.yaml", f"kafka: {{{name}: {none}}}") == Settings()


def test_an_empty_variable_is_none() -> None:
    assert load(KAFKA__SSL_CA_FILE="", KAFKA__SASL_USERNAME="") == Settings()


MISTAKES_IN_VARIABLES = [
    ({"KAFKA_BOOTSTRAP_SERVERS": "x"}, "did you mean GPULEDGER_KAFKA__BOOTSTRAP_SERVERS?"),
    ({"KAFKA__BOOTSTRAP_SERVER": "x"}, "did you mean GPULEDGER_KAFKA__BOOTSTRAP_SERVERS?"),
    ({"kafka__client_id": "x"}, "did you mean GPULEDGER_KAFKA__CLIENT_ID?"),
    ({"XYZ": "x"}, "variable GPULEDGER_XYZ: `gpuledger config explain` lists all"),
    ({"CLUSTER": "x"}, "CLUSTER: only `gpuledger agent` and `gpuledger podwatch` have"),
    (
        {"SAMPLING_INTERVAL_SECONDS": "soon"},
        "GPULEDGER_SAMPLING_INTERVAL_SECONDS: expected a number, got 'soon'",
    ),
    ({"TICKS": "1.5"}, "GPULEDGER_TICKS: expected a whole number, got '1.5'"),
    ({"KIND": "three"}, "GPULEDGER_KIND: expected one of one, two, got 'three'"),
    ({"KAFKA__REQUEST_TIMEOUT_SECONDS": "0"}, "expected a number > 0, got '0'"),
    ({"KAFKA__SSL_CHECK_HOSTNAME": "maybe"}, "expected true or false, got 'maybe'"),
    ({"KAFKA__BOOTSTRAP_SERVERS": ""}, "expected a text of length >= 1, got ''"),
    (
        {"HTTP__LISTEN": "9820"},
        "GPULEDGER_HTTP__LISTEN: expected host:port such as 0.0.0.0:9820, got '9820'",
    ),
    ({"HTTP__LISTEN": ":99999"}, "got ':99999'"),
    (
        {"KAFKA__SECURITY_PROTOCOL": "SASL_SSL"},
        "GPULEDGER_KAFKA__SECURITY_PROTOCOL: SASL_SSL needs",
    ),
    ({"KAFKA__SSL_CERT_FILE": "/c"}, "GPULEDGER_KAFKA__SSL_CERT_FILE: needs ssl_key_file too"),
    ({"KAFKA__SSL_KEY_FILE": "/c"}, "GPULEDGER_KAFKA__SSL_KEY_FILE: needs ssl_cert_file too"),
    (
        {"WATCH__RULES": "[{nme: x}]"},
        "WATCH__RULES: watch.rules[0]: expected a mapping of name, seconds, got",
    ),
    ({"WATCH__RULES": "[{"}, "GPULEDGER_WATCH__RULES: expected a list: while parsing"),
    ({"WATCH__TOKEN": "********"}, "the mask of --print-config"),
]


@pytest.mark.parametrize(("variables", "message"), MISTAKES_IN_VARIABLES)
def test_an_error_in_the_environment_is_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load(**variables)

    assert message in str(raised.value)


MISTAKES_IN_FILES = [
    ("kafka: {bootstrap_server: x}", "unknown setting kafka.bootstrap_server in"),
    ("kafka: {bootstrap_server: x}", "did you mean kafka.bootstrap_servers?"),
    ("bootstrap_servers: x", "did you mean kafka.bootstrap_servers?"),
    ("kafak: {client_id: x}", "did you mean kafka?"),
    ("kafka: here", "kafka in {file}: expected a mapping, got a text"),
    ("ticks: '7'", "ticks in {file}: expected a whole number, got '7'"),
    ("ticks: true", "ticks in {file}: expected a whole number, got true"),
    ("kafka: {client_id: 5}", "kafka.client_id in {file}: expected a text, got 5"),
    ("kafka: {client_id: null}", "kafka.client_id in {file}: expected a text, got null"),
    ("http: {listen: x}", "http.listen in {file}: expected host:port such as 0.0.0.0:9820"),
    ("kafka: {bootstrap_servers: x}", "kafka.bootstrap_servers in {file}: 'x': expected host:port"),
    (
        "watch: {rules: [{name: 5}]}",
        "watch.rules[0].name in {file}: expected a text, got 5: put it in quotes",
    ),
    (
        "ticks: 1\nkind: one\nticks: 2",
        "duplicate key 'ticks', first in line 1: remove one of them (line 3, column 1)",
    ),
    ("- ticks", "expected a mapping of settings, got a list"),
    ("ticks: [", "{file}: invalid YAML"),
    ("? [a, b]\n: 1", "{file}: invalid YAML"),
    ("7: 1", "unknown setting 7 in"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES_IN_FILES)
def test_an_error_in_the_file_is_named_with_the_file(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "settings.yaml"

    with pytest.raises(SettingsError) as raised:
        load_file(file, text)

    assert message.replace("{file}", str(file)) in str(raised.value)


def test_a_missing_settings_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, check=has_words("none.yaml")):
        load("--config", str(tmp_path / "none.yaml"))


HELP = "see `watcher --help`"
LEVEL = "set GPULEDGER_LOG__LEVEL, or log.level in the settings file"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tik", "1"], "unknown option: --tik; did you mean `--tick`?"),
        (["--tik=1"], "unknown option: --tik; did you mean `--tick`?"),
        (["one", "two"], f"unknown argument: two; {HELP}"),
        (["one", "log.level=debug"], f"unknown argument: log.level; {LEVEL}"),
        (["--log.level=debug"], f"unknown option: --log.level; {LEVEL}"),
        (["--level", "debug"], f"unknown option: --level; {LEVEL}"),
        (
            ["--ticks", "1"],
            "unknown option: --ticks; set GPULEDGER_TICKS, or ticks in the settings file",
        ),
        (["one", "usr:hunter2@host"], f"unknown argument: ********; {HELP}"),
        (["--zzz=hunter2"], f"unknown option: --zzz; {HELP}"),
        (["--config"], f"--config: expected one argument; {HELP}"),
        (["tow", "--help"], "unknown argument: tow; did you mean `two`?"),
        (["zzz", "--help"], f"unknown argument: zzz; {HELP}"),
    ],
)
def test_an_unknown_argument_is_named_without_its_value_and_with_its_remedy(
    argv: list[str], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*argv)
    assert str(caught.value) == message


def test_an_unknown_option_names_no_setting_of_a_section_that_was_not_chosen() -> None:
    kind = Option(
        name="kind", setting="kind", help="", choices=("watch", "x"), chooses_section=True
    )
    with pytest.raises(SettingsError, match="unknown option: --namespaces; see"):
        load_settings(
            Settings, prog="p", description="", options=[kind], argv=["x", "--namespaces", "a"]
        )


def test_an_invalid_value_of_an_option_is_named_by_the_option() -> None:
    with pytest.raises(SettingsError, check=has_words("--tick", "'soon'")):
        load("--tick", "soon")
    with pytest.raises(SettingsError, check=has_words("kind", "one, two", "'three'")):
        load("three")


def test_a_missing_required_setting_is_named_with_both_ways_to_set_it() -> None:
    with pytest.raises(SettingsError, check=has_words("node_name", "GPULEDGER_NODE_NAME")):
        load_settings(Strict, prog="p", description="d", argv=[], environ={})


def test_variables_that_kubernetes_sets_for_a_service_are_not_errors() -> None:
    links = {
        "JOIN_SERVICE_HOST": "10.0.0.1",
        "JOIN_SERVICE_PORT": "9822",
        "JOIN_SERVICE_PORT_HTTP": "9822",
        "JOIN_PORT": "tcp://10.0.0.1:9822",
        "JOIN_PORT_9822_TCP": "tcp://10.0.0.1:9822",
        "JOIN_PORT_9822_TCP_PROTO": "tcp",
        "JOIN_PORT_9822_TCP_ADDR": "10.0.0.1",
    }
    assert load(**links) == Settings()
    with pytest.raises(SettingsError, check=has_words("GPULEDGER_HTTP_PORT")):
        load(HTTP_PORT="9820")


def test_variables_without_the_prefix_are_ignored() -> None:
    environ = {"GPULEDGER": "x", "KAFKA__CLIENT_ID": "x"}

    assert (
        load_settings(Settings, prog="p", description="d", argv=[], environ=environ) == Settings()
    )


def test_help_lists_common_settings_with_default_variable_and_meaning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")

    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for line in (
        "kafka.client_id (default watcher)",
        "GPULEDGER_KAFKA__CLIENT_ID",
        "Length of a tick: 100 % of it is covered.",
        "ticks (default none)",
        "watch.costs (default {})",
        "--tick",
        "one|two",
        "Examples:\n  watcher --tick 2\n",
    ):
        assert line in shown
    assert "kafka.topic_prefix" not in shown


def test_help_shows_which_settings_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(
            Strict, prog="p", description="d", common=["node_name"], argv=["--help"], environ={}
        )

    assert "node_name (required)\n      GPULEDGER_NODE_NAME" in capsys.readouterr().out


def test_version_names_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--version")

    assert capsys.readouterr().out.startswith("watcher 0.")


def test_the_printed_settings_are_yaml_that_loads_to_the_same_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"WATCH__RULES": "[{name: x}]", "KAFKA__SSL_CA_FILE": "/ca", "TICKS": "3"}
    with pytest.raises(SystemExit) as ended:
        load("--print-config", **variables)
    shown = capsys.readouterr().out

    assert ended.value.code == 0
    assert load_file(tmp_path / "s.yaml", shown) == load(**variables)


def test_the_printed_settings_show_a_mask_for_each_secret(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load("--print-config", WATCH__TOKEN="hunter2", KAFKA__SASL_PASSWORD="hunter2")
    shown = capsys.readouterr().out

    assert "hunter2" not in shown
    assert yaml.safe_load(shown)["watch"]["token"] == "********"


def test_the_printed_settings_mask_passwords_in_addresses_and_the_values_of_headers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither has a secret type, but people put passwords in both."""
    with pytest.raises(SystemExit):
        load(
            "--print-config",
            WATCH__URLS="http://ada:hunter2@one:9093/x,http://two/@x",
            WATCH__HEADERS="{X-Api-Key: hunter2}",
            WATCH__COSTS="{gpu: 2.5}",
        )
    shown = yaml.safe_load(capsys.readouterr().out)["watch"]

    assert shown["urls"] == ["http://one:9093/x", "********"]
    assert shown["headers"] == {"X-Api-Key": "********"}
    assert shown["costs"] == {"gpu": 2.5}


def test_an_option_without_a_value_makes_its_setting_true() -> None:
    class Loud(msgspec.Struct, frozen=True, kw_only=True):
        is_loud: bool = False

    options = [Option(name="--loud", setting="is_loud", help="be loud", is_flag=True)]
    for argv, is_loud in ((["--loud"], True), ([], False)):
        loaded = load_settings(
            Loud, prog="p", description="", options=options, argv=argv, environ={}
        )
        assert loaded.is_loud is is_loud
