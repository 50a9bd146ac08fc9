"""reference/cli.md has every command and component with all its options."""

import re
from collections.abc import Iterator

import pytest
from cyclopts import App

from gpuledger_cli.command import app
from tests.docs_gen import components
from tests.docs_gen.cli_page import cli_page

COMPONENTS = {component.name for component in components.COMPONENTS}
SECTIONS = dict(re.findall(r"^### (.+)\n((?:(?!##).*\n)*)", cli_page(), re.MULTILINE))


def commands(group: App, name: str) -> Iterator[tuple[str, App]]:
    for sub in group:
        if not sub.startswith("-") and sub not in {"config", "help", *COMPONENTS}:
            yield f"{name} {sub}", group[sub]
            yield from commands(group[sub], f"{name} {sub}")


COMMANDS = dict(commands(app, "gpuledger"))


def test_every_command_that_does_something_and_every_component_has_a_section() -> None:
    expected = {name for name, command in COMMANDS.items() if command.default_command}
    expected |= {f"gpuledger {name}" for name in COMPONENTS} | {"gpuledger config explain"}

    assert len(expected) > 20
    assert expected <= set(SECTIONS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].default_command])
def test_a_section_has_each_option_that_help_prints(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    app([*name.split()[1:], "--help"], exit_on_error=False)
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (`.+?`) \|", SECTIONS[name], re.MULTILINE)

    for option in re.findall(r"^  (--[a-z-]+)", printed, re.MULTILINE):
        assert any(f"`{option}`" in row for row in rows), option


def test_examples_and_exit_codes_are_those_of_the_help() -> None:
    section = SECTIONS["gpuledger bill close"]

    assert "gpuledger bill close --store gpuledger-store --period lastmonth" in section
    assert "| `1` | not closed: usage is missing" in section
    assert "| `130` |" not in section, "the same for all commands"


def test_no_line_of_an_example_is_wider_than_the_help() -> None:
    """Help in a file has 80 columns, and a command that it breaks cannot be copied."""
    examples = re.findall(r"^```sh\n(.*?)^```$", cli_page(), re.MULTILINE | re.DOTALL)

    assert len(examples) > 20
    assert [line for each in examples for line in each.splitlines() if len(f"  {line}") > 80] == []


def test_a_component_has_its_options_and_examples() -> None:
    section = SECTIONS["gpuledger agent"]

    for text in ("| `--no-kafka` |", "| `--config FILE` |", "gpuledger agent --no-kafka"):
        assert text in section
