"""`gpuledger config explain` prints all settings of a component, or those with a prefix."""

import re
import subprocess
import sys

import pytest

from gpuledger.errors import SettingsError
from gpuledger.programs import COMPONENTS
from gpuledger.settings.explain_command import main, settings_text

NAME = re.compile(r"^ {2}(\S+) \(", re.MULTILINE)


@pytest.mark.parametrize("component", COMPONENTS)
def test_every_component_explains_its_settings_with_default_variable_and_meaning(
    component: str,
) -> None:
    explained = settings_text(component)

    assert explained.startswith("Settings by name in the file")
    assert "  log.level (default info)\n      GPULEDGER_LOG__LEVEL\n      " in explained


@pytest.mark.parametrize("component", COMPONENTS)
def test_explaining_a_component_imports_nothing_heavy(component: str) -> None:
    heavy = {"aiohttp", "aiokafka", "cyclopts", "deltalake", "duckdb", "pynvml"}
    code = (
        "import sys; from gpuledger.settings.explain_command import settings_text;"
        f"settings_text({component!r}); print(*sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert heavy.isdisjoint(ended.stdout.split())


@pytest.mark.parametrize(
    ("component", "name", "accepted"),
    [
        ("join", "kafka.security_protocol", "one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("sink", "remote_write.final_statuses", "a list of any of 401, 403, 404"),
        ("agent", "sampling_interval_seconds", "a number >= 0.25 and <= 60"),
    ],
)
def test_the_accepted_values_are_explained(component: str, name: str, accepted: str) -> None:
    assert f" Accepts {accepted}." in " ".join(settings_text(component, name).split())


def test_a_prefix_selects_a_group_of_settings_or_one_of_them() -> None:
    everything = NAME.findall(settings_text("sink"))
    stores = NAME.findall(settings_text("sink", "store"))

    assert stores == [name for name in everything if name.startswith("store.")]
    assert NAME.findall(settings_text("join", "kafka.client_id")) == ["kafka.client_id"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("GPULEDGER_LOG__LEVEL", ["log.level"]),
        ("sampling", ["sampling_interval_seconds"]),
        ("log", ["log.level", "log.format"]),
    ],
)
def test_a_variable_or_a_part_of_a_name_selects_settings_if_no_group_has_that_name(
    text: str, names: list[str]
) -> None:
    assert sorted(NAME.findall(settings_text("agent", text))) == sorted(names)


HELP = "see `gpuledger config explain --help`"
CHOICES = "give agent, podwatch, join, sink, reports or standalone"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("explain", f"COMPONENT: missing; {CHOICES}"),
        ("explain jion", "COMPONENT: invalid value 'jion'; did you mean `join`?"),
        ("explain zzz", f"COMPONENT: invalid value 'zzz'; {CHOICES}"),
        ("explain sink store flush", f"unknown argument: flush; {HELP}"),
        ("explain sink --hlep", "unknown option: --hlep; did you mean `--help`?"),
        ("explain sink --store", f"unknown option: --store; {HELP}"),
        ("expain sink", "unknown command: expain; did you mean `explain`?"),
        ("print", f"unknown command: print; {HELP}"),
    ],
)
def test_an_invalid_call_is_one_line_with_its_remedy_and_exit_code_2(
    argv: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuledger config", *argv.split()])
    assert main() == 2

    printed = capsys.readouterr()
    assert (printed.err, printed.out) == (f"gpuledger config: {message}\n", "")


@pytest.mark.parametrize(
    ("component", "prefix", "remedy"),
    [
        ("sink", "sotre", "did you mean store?"),
        ("join", "kafka.cleint_id", "did you mean kafka.client_id?"),
        ("join", "cleint_id", "did you mean kafka.client_id?"),
        ("join", "zzz", "run `gpuledger config explain join`"),
        ("standalone", "retention", "run `gpuledger config explain standalone`"),
    ],
)
def test_an_unknown_setting_suggests_only_a_similar_one(
    component: str, prefix: str, remedy: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        settings_text(component, prefix)
    assert str(caught.value) == f"PREFIX: unknown setting of {component}: {prefix!r}; {remedy}"


def test_gpuledger_config_without_a_command_prints_its_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpuledger config"])

    assert main() == 0
    assert "explain" in capsys.readouterr().out
