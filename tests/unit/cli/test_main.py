"""The command for users: help, completion, version, and errors in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuledger import __version__
from gpuledger.programs import COMPONENTS
from gpuledger.time_ranges import TIME_FORMS
from gpuledger_cli.__main__ import main

COMMANDS = (
    *(
        "compare",
        "demo",
        "doctor",
        "load",
        "query",
        "watermarks",
        "replay",
        "cgroup",
        "record-nvml",
        "store maintain",
    ),
    *("topics create", "topics check", "topics export", "cluster retire"),
    *("bill", "bill check", "bill close", "bill explain", "completion"),
    *(
        "dead-letters list",
        "dead-letters show",
        "dead-letters replay",
        "autoscale check",
        "inspect",
    ),
)
SEE_HELP = "see `gpuledger topics check --help`"


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    commands, _, components = capsys.readouterr().out.partition("\nComponents:\n")
    assert all(
        command in commands for command in ("demo", "topics", "cgroup", "replay", "dead-letters")
    )
    assert [name for name in COMPONENTS if f"  {name} " not in components] == []


@pytest.mark.parametrize("group", ["", "autoscale", "bill", "dead-letters", "store", "topics"])
def test_a_group_without_a_command_prints_its_help(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(group.split()) == 0
    bare = capsys.readouterr().out
    assert main([*group.split(), "--help"]) == 0
    assert capsys.readouterr().out == bare


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_components_and_options(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0

    script = capsys.readouterr().out
    words = ("gpuledger", "maintain", "podwatch", "replication", "no-kafka", "remote_write")
    assert [word for word in words if word not in script] == []
    assert re.search(r"(?<!-)\bhelp\b", script)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples_exit_codes_and_describes_every_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0

    shown = capsys.readouterr().out
    _, has_examples, examples = shown.partition("\nExamples:\n  # ")
    assert has_examples
    assert f"gpuledger {command}" in examples
    assert "\nExit codes:\n  0  " in examples
    assert not re.search(r"^  [-A-Z][\w:-]+( --\S+)* +(\[.*)?$", shown, re.MULTILINE)
    assert {"--since", "--until", "--from", "--to"} & {*re.findall(r"--\w+", shown)} == set() or (
        TIME_FORMS in " ".join(shown.split())
    )


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("topics export", "topics export --format FORMAT [OPTIONS]"),
        ("bill close", "bill close --store STORE [OPTIONS]"),
        ("dead-letters show", "dead-letters show [OPTIONS] PARTITION:OFFSET..."),
        ("dead-letters replay", "dead-letters replay [OPTIONS] [PARTITION:OFFSET...]"),
        ("cgroup", "cgroup [OPTIONS] [PATH-OR-LINE...]"),
        ("autoscale check", "autoscale check [OPTIONS] FILE..."),
        ("inspect", "inspect [OPTIONS] [NODE...]"),
    ],
)
def test_usage_shows_the_names_of_required_options_and_of_arguments(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: gpuledger {usage}\n")


def test_a_group_without_a_command_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topics"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in ("create", "check", "export", "ACLs"))


@pytest.mark.parametrize("command", ["topics check", "watermarks", "dead-letters list"])
def test_help_names_the_variable_and_the_default_of_the_brokers(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "[env var: GPULEDGER_KAFKA__BOOTSTRAP_SERVERS] [default: localhost:9092]" in shown

    monkeypatch.setenv("GPULEDGER_KAFKA__BOOTSTRAP_SERVERS", "127.0.0.1:1")
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.count("127.0.0.1:1") == 1
    assert "check --bootstrap-servers or GPULEDGER_KAFKA__BOOTSTRAP_SERVERS" in error
    assert "kafka." not in error


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["topisc"], "topisc"),
        (["agnet", "--help"], "agent"),
        (["topics", "chekc"], "chekc"),
        (["bill", "expain"], "unknown argument: expain; did you mean `explain`?"),
        (["bill", "expain", "--store", "s"], "unknown argument: expain; did you mean `explain`?"),
        (["bill", "explain", "a", "--store", "s", "--rows", "-5"], "--rows: invalid value '-5'"),
        (["bill", "--store", "s", "--period", "7" * 500], "7" * 20 + "…"),
        (["store", "maintain", "--store", "s", "a" * 500], "a" * 50 + "…"),
        (["topics", "create", "--replication-factor", "0"], "--replication-factor"),
        (["topics", "check", "--config", "/absent.yaml"], "/absent.yaml"),
        (["topics", "check", "--bootstrap-servers", "127.0.0.1:1"], "127.0.0.1:1"),
        (["topics", "check", "--bootstrap-servers", "kafka:http"], "'********': expected host:"),
        (["topics", "create", "--bootstrap-servers", "kafka://a:1"], "without a scheme"),
        (["replay"], "--from"),
        (["replay", "--from", "yesterday", "--compare"], "--from: invalid time 'yesterday'"),
        (["replay", "--from", "-1h"], "--output FILE, --topic NAME or --compare"),
        (["replay", "--from", "-1h", "--output", "a", "--topic", "b"], "--output and --topic"),
        (["replay", "--from", "-1h", "--to", "-2h", "--compare"], "is not before --to"),
        (["topics", "export", "--format", "strimzi"], "--cluster: missing"),
        (["compare", "node:9400"], "URL: 'node:9400' must begin with http:// or https://"),
        (["doctor", "join:9822"], "URL: 'join:9822' must begin with http:// or https://"),
        (["doctor", "--skip", "brokres"], "--skip"),
        (["watermarks", "--until", "tomorrow"], "--until: invalid time 'tomorrow'"),
        (["cluster", "retire", "a", "--since", "soon"], "--since: invalid time 'soon'"),
        (
            ["replay", "--from", "-1h", "--lead-in", "5", "--compare"],
            "--lead-in: invalid duration",
        ),
        (
            ["replay", "--from", "-1h", "--compare", "--bootstrap-servers", "127.0.0.1:1"],
            "127.0.0.1:1",
        ),
    ],
)
def test_an_invalid_argument_is_one_line_and_exit_code_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2

    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1
    assert len(printed.err) < 400
    assert printed.out == ""


@pytest.mark.parametrize(
    ("command", "redirection"),
    [
        ("topics export --format acls", ">/dev/full"),
        ("topics export --format acls", ">&-"),
        ("config explain join", ">/dev/full"),
        ("config explain join", ">&-"),
        ("join --print-config", ">/dev/full"),
        ("agent --help", ">/dev/full"),
        ("sink store --version", ">/dev/full"),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(
    command: str, redirection: str
) -> None:
    start = "from gpuledger.programs import main; raise SystemExit(main())"
    script = f'exec "$0" -c "{start}" {command} {redirection}'
    ran = subprocess.run(
        ["sh", "-c", script, sys.executable],  # noqa: S607  # found by PATH
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )

    assert ran.returncode == 2
    assert ran.stderr.startswith("gpuledger: cannot write the output: ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("demo --for", "20", "write a number and a unit, 0.1s to 1d"),
        ("demo --for", "2d", "it must be 0.1s to 1d"),
        ("record-nvml --interval", "1", "write a number and a unit, 0.25s to 1m"),
        ("record-nvml --interval", "0.1s", "it must be 0.25s to 1m"),
        ("store maintain --store s --every", "2d", "it must be 1s to 1d"),
        ("store maintain --store s --orphan-age", "5", "write 36h, 7d or 2w"),
        ("store maintain --store s --orphan-age", "0h", "it must be whole hours, at least 1"),
        ("store maintain --store s --usage-retention", "5", "write 7d or 2w"),
        ("store maintain --store s --usage-retention", "12h", "it must be whole days"),
    ],
)
def test_an_invalid_duration_is_reported_with_forms_that_the_option_accepts(
    option: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*option.split(), value]) == 2

    name = option.rpartition(" ")[2]
    expected = f"gpuledger: {name}: invalid duration {value!r}; {remedy}\n"
    assert capsys.readouterr().err == expected


def test_help_shows_the_limits_of_a_duration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    assert "Duration: 0.1s to 1d." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "argv",
    [
        ["topics", "check", "--bootstrap-servers", "usr:hunter2@host:9092"],
        ["topics", "create", "--bootstrap-servers", "one:9092,usr:hunter2@host:9092"],
        ["replay", "--from", "-1h", "--compare", "--bootstrap-servers", "usr:hunter2@host:9092"],
        ["demo", "--bus", "kafka://usr:hunter2@host:9092"],
        ["demo", "--bus", "usr:hunter2@host:9092"],
        ["demo", "--remote-write-url", "usr:hunter2@host:9090/w"],
        ["demo", "--alertmanager-url", "htp://usr:hunter2@host:9090/w"],
        ["demo", "--format", "http://usr:hunter2@host:9090/w"],
    ],
)
def test_an_error_is_reported_without_the_password_in_its_value(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2

    message = capsys.readouterr().err
    assert argv[-2] in message or "bootstrap_servers" in message
    assert "host:909" in message or "********" in message
    assert "hunter" not in message
    assert message.count("\n") == 1


def test_a_closed_pipe_ends_the_command_without_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as output:
        ran = subprocess.run(
            [sys.executable, "-m", "gpuledger_cli", "topics", "export", "--format", "acls"],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
            cwd=Path(__file__).parents[3],
        )

    assert (ran.returncode, ran.stderr) == (141, b"")


def test_help_loads_no_component() -> None:
    code = (
        "import sys; from gpuledger_cli.__main__ import main; main(['--help']); print(*sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )

    assert not {"aiokafka", "deltalake", "pynvml"} & set(ran.stdout.split())


def test_an_error_about_a_missing_store_names_the_option_and_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("GPULEDGER_STORE__URI", raising=False)

    assert main(["bill", "--by", "namespace"]) == 2
    error = capsys.readouterr().err
    assert "--store" in error
    assert "GPULEDGER_STORE__URI" in error


def run_with(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
        cwd=Path(__file__).parents[3],
    )


def test_an_unexpected_error_is_internal_and_has_its_traceback_and_exit_code_5() -> None:
    ran = run_with(
        "from gpuledger_cli.__main__ import main\n"
        "from gpuledger_cli.command import app\n"
        "app.command(lambda: 1 / 0, name='broken')\n"
        "raise SystemExit(main(['broken']))"
    )
    assert ran.returncode == 5
    assert "ZeroDivisionError" in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("gpuledger: internal error; please report it")


def test_output_in_an_encoding_that_lacks_a_character_is_one_line_and_exit_code_2() -> None:
    ran = run_with(
        "from gpuledger_cli.__main__ import main\n"
        "from gpuledger_cli.command import app\n"
        "app.command(lambda: print('\u00fc'), name='umlaut')\n"
        "raise SystemExit(main(['umlaut']))",
        PYTHONIOENCODING="ascii",
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "cannot write the output as ascii" in ran.stderr


def test_an_argument_that_is_not_utf_8_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bill", "--store", "d1\udcff"]) == 2
    assert capsys.readouterr().err == "gpuledger: invalid argument: 'd1\\udcff'; it is not UTF-8\n"


def test_help_is_printed_if_the_terminal_reports_a_width_of_0() -> None:
    ran = run_with(
        "from gpuledger_cli.__main__ import main; raise SystemExit(main(['--help']))", COLUMNS="0"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bil"], "unknown command: bil; did you mean `bill`?"),
        (["deadletters", "list"], "unknown command: deadletters; did you mean `dead-letters`?"),
        (["Topics"], "unknown command: Topics; did you mean `topics`?"),
        (["--verison"], "unknown option: --verison; did you mean `--version`?"),
        (["zzzzzz"], "unknown command: zzzzzz; see `gpuledger --help`"),
        (["bill", "explian"], "unknown argument: explian; did you mean `explain`?"),
        (["topics", "export"], "--format: missing; give strimzi or acls"),
        (["completion"], "SHELL: missing; give bash, zsh or fish"),
        (["bill", "--store"], "--store: missing; give it, or set GPULEDGER_STORE__URI"),
        (["bill", "check"], "FILE: missing; see `gpuledger bill check --help`"),
        (["bill", "--perod", "7d"], "unknown option: --perod; did you mean `--period`?"),
        (["bill", "--store=s", "--perod=7d"], "unknown option: --perod; did you mean `--period`?"),
        (["replay", "--form", "-1h"], "unknown option: --form; did you mean `--from`?"),
        (
            ["bill", "--period", "7d", "--store"],
            "--store: missing; give it, or set GPULEDGER_STORE__URI",
        ),
        (["topics", "chekc"], "unknown command: topics chekc; did you mean `check`?"),
        (["bill", "chek", "--help"], "unknown command: bill chek; did you mean `check`?"),
        (["demo", "foo", "--help"], "unknown argument: foo; see `gpuledger demo --help`"),
        (["topics", "check", "x", "--help"], f"unknown argument: x; {SEE_HELP}"),
        (["bill", "--by", "pod", "--by", "job"], "--by: given more than once; give it once"),
        (["completion", "zhs"], "SHELL: invalid value 'zhs'; did you mean `zsh`?"),
        (
            ["topics", "export", "--format", "x"],
            "--format: invalid value 'x'; give strimzi or acls",
        ),
        (
            ["doctor", "--receiver", "prometheus"],
            "--receiver: invalid value 'prometheus'; give remote_write or alerts",
        ),
        (
            ["doctor", "--as", "sink-remote-write"],
            "--as: invalid value 'sink-remote-write'; did you mean `remote_write`?",
        ),
        (
            ["topics", "create", "--partitions", "x"],
            "--partitions: invalid value 'x'; give a whole number",
        ),
        (
            ["topics", "create", "--partitions", "0"],
            "--partitions: invalid value '0'; it must be >= 1",
        ),
    ],
)
def test_a_mistyped_missing_or_invalid_argument_is_named_with_its_remedy(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == f"gpuledger: {message}\n"
