"""The command for people answers, and tells mistakes in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuledger import __version__
from gpuledger.programs import COMPONENTS
from gpuledger_cli.__main__ import main


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    commands, _, components = capsys.readouterr().out.partition("─ Components ─")
    assert all(
        command in commands for command in ("demo", "topics", "cgroup", "replay", "dead-letters")
    )
    assert [name for name in COMPONENTS if f"│ {name} " not in components] == []


@pytest.mark.parametrize("group", ["", "bill", "dead-letters", "store", "topics"])
def test_a_group_by_itself_prints_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert all(word in script for word in ("gpuledger", "maintain", "podwatch", "--replication"))


def test_the_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["topisc"], "topisc"),
        (["agnet", "--help"], "agent"),
        (["topics", "chekc"], "chekc"),
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
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2

    printed = capsys.readouterr()
    assert named in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


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
def test_a_mistake_is_told_without_the_password_in_it(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2

    said = capsys.readouterr().err
    assert argv[-2] in said or "bootstrap_servers" in said
    assert "host:909" in said or "********" in said
    assert "hunter" not in said
    assert said.count("\n") == 1


def test_output_that_nobody_reads_on_ends_it_without_a_complaint() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as output:
        ran = subprocess.run(
            [sys.executable, "-m", "gpuledger_cli", "topics", "strimzi", "--cluster", "main"],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
            cwd=Path(__file__).parents[3],
        )

    assert (ran.returncode, ran.stderr) == (141, b"")


def test_help_loads_no_stage() -> None:
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
