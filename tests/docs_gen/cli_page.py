"""reference/cli.md: every command and component with its help, from the definitions of `--help`."""

import re
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from inspect import Parameter
from io import StringIO
from typing import Final
from unittest.mock import patch

from cyclopts import App
from cyclopts.argument import Argument

from gpuledger.settings import Option, explain_command
from gpuledger.settings.command_line import EXIT_CODES, SHARED_OPTIONS
from gpuledger_cli.command import app
from gpuledger_cli.option_help import COMMON_CODES
from tests.docs_gen.components import COMPONENTS, Component
from tests.docs_gen.markdown import code, head, mark_code, table

_HEAD: Final = head(
    "Command line",
    audience="SRE",
    about="""\
Commands and components of `gpuledger`, with all options. Use this page to find an option;
`gpuledger help COMMAND` prints the same.""",
)
_COMMANDS: Final = """
## Commands

Commands print errors as one line on standard error. `gpuledger --version` prints the version, and
`gpuledger COMMAND --help` the help of a command. Unless a command lists another meaning, exit codes
are:

"""
_COMPONENTS: Final = """
## Components

Components take their [settings](settings.md) from a file and from environment variables. Their exit
codes are these; the agent also has 70, see [Stability](stability.md).
"""
_COLUMNS: Final = ("option", "default", "meaning")
_PLAIN_COLUMNS: Final = ("option", "meaning")
_CODE_COLUMNS: Final = ("exit code", "meaning")
_COMMON: Final = {0: "success", **COMMON_CODES}.items()
_ELSEWHERE: Final = frozenset({"config", "help", *(component.name for component in COMPONENTS)})
"""Names in the command's `app` that other programs run."""
_VARIABLE: Final = re.compile(r" ?\[env var: (\w+)\]")


def cli_page() -> str:
    """Return the page, in Markdown."""
    commands = [line for name in _names(app) for line in _command(app[name], f"gpuledger {name}")]
    components = [line for component in COMPONENTS for line in _component(component)]
    codes = table(_CODE_COLUMNS, [(code(str(number)), text) for number, text in _COMMON])
    lines = [*_HEAD.splitlines(), *_COMMANDS.splitlines(), *codes, *commands, *_config_explain()]
    component_codes = table(
        _CODE_COLUMNS, [(code(str(number)), text) for number, text in EXIT_CODES.items()]
    )
    return "\n".join([*lines, *_COMPONENTS.splitlines(), "", *component_codes, *components, ""])


def _names(group: App) -> list[str]:
    return [name for name in group if not name.startswith("-") and name not in _ELSEWHERE]


def _command(command: App, name: str) -> Iterator[str]:
    """Yield the section of a command, then those of its subcommands."""
    subcommands = _names(command)
    if command.default_command is not None:
        yield from _described(command, name)
    elif len(subcommands) > 1:
        yield from ("", f"### {name}", "", _summary(command), "")
        yield from (f"- [{name} {sub}](#{_anchor(f'{name} {sub}')})" for sub in subcommands)
    for sub in subcommands:
        yield from _command(command[sub], f"{name} {sub}")


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _summary(command: App) -> str:
    # Sections of a docstring have the options.
    return (command.help or "").partition("\n\n    Parameters\n")[0].strip()


def _described(command: App, name: str) -> Iterator[str]:
    arguments = [
        argument
        for argument in command.assemble_argument_collection(parse_docstring=True)
        if argument.show
    ]
    yield from (
        "",
        f"### {name}",
        "",
        *(mark_code(" ".join(line.split())) for line in _summary(command).splitlines()),
    )
    yield from ("", "```console", f"$ {name}{_usage(arguments)}", "```", "")
    yield from table(_COLUMNS, map(_row, arguments))
    yield from _epilogue(command)


def _usage(arguments: list[Argument]) -> str:
    words = []
    for argument in arguments:
        name = argument.name
        if argument.required:
            words.append(f"{name} {name.lstrip('-').upper()}" if name.startswith("-") else name)
        elif not name.startswith("-"):
            words.append(f"[{name}…]")
    is_optional = any(each.name.startswith("-") and not each.required for each in arguments)
    return "".join(f" {word}" for word in [*words, *(["[OPTIONS]"] if is_optional else [])])


def _row(argument: Argument) -> tuple[str, str, str]:
    meaning = argument.parameter.help or ""
    variables = [*(argument.parameter.env_var or ()), *_VARIABLE.findall(meaning)]
    meaning = _VARIABLE.sub("", meaning)
    choices = argument.get_choices()
    if choices and not all(re.search(rf"\b{choice}\b", meaning) for choice in choices):
        meaning += f" One of {', '.join(code(choice) for choice in choices)}."
    if variables:
        meaning += f" Variable: {code(*variables)}."
    return ", ".join(code(name) for name in argument.names), _default(argument), mark_code(meaning)


def _default(argument: Argument) -> str:
    if argument.required:
        return "required"
    if callable(argument.show_default):
        return code(str(argument.show_default(argument.field_info.default)))
    default = argument.field_info.default
    is_shown = argument.show_default and default not in (Parameter.empty, None, False)
    return code("yes" if default is True else str(default)) if is_shown else ""


def _epilogue(command: App) -> Iterator[str]:
    """Yield the text, the examples and the exit codes below the options."""
    shown = command.help_epilogue or ""
    text, _, rest = f"\n\n{shown}".partition("\n\nExamples:\n")
    examples, _, codes = rest.partition("\n\nExit codes:\n")
    if text.strip():
        yield from ("", *map(mark_code, text.strip().splitlines()))
    if examples:
        yield from (
            "",
            "```sh",
            *(line.removeprefix("  ") for line in examples.splitlines()),
            "```",
        )
    own = [line.split(maxsplit=1) for line in codes.splitlines()]
    if rows := [(code(number), text) for number, text in own if (int(number), text) not in _COMMON]:
        yield from ("", *table(_CODE_COLUMNS, rows))


def _config_explain() -> Iterator[str]:
    """Yield the printed help of a command that has its own parser."""
    output = StringIO()
    arguments = ["gpuledger config", "explain", "--help"]
    with patch("sys.argv", arguments), redirect_stdout(output), suppress(SystemExit):
        explain_command.main()
    yield from (
        "",
        "### gpuledger config explain",
        "",
        "```text",
        *output.getvalue().splitlines(),
        "```",
    )


def _option(option: Option) -> str:
    """Return an option with its values; a table has no bars within cells."""
    if not option.name.startswith("-"):
        return ", ".join(code(choice) for choice in option.choices)
    if option.is_flag:
        return code(option.name)
    values = option.choices or (option.metavar or option.attribute.upper(),)
    return f"{code(option.name)} {', '.join(code(value) for value in values)}"


def _paragraphs(description: str) -> Iterator[str]:
    """Yield the paragraphs of a description; indented ones keep their lines, as in `--help`."""
    for paragraph in description.split("\n\n"):
        if paragraph.startswith(" "):
            yield from ("```text", *textwrap.dedent(paragraph).splitlines(), "```", "")
        else:
            yield from (mark_code(paragraph), "")


def _component(component: Component) -> Iterator[str]:
    name = f"gpuledger {component.name}"
    positional = [each for each in component.options if not each.name.startswith("-")]
    usage = "".join(f" [{'|'.join(each.choices)}]" for each in positional)
    yield from ("", f"### {name}", "", *_paragraphs(component.module.DESCRIPTION))
    yield from ("```console", f"$ {name}{usage} [OPTIONS]", "```", "")
    own = [(_option(option), option.help) for option in component.options]
    shared = [(code(f"{option} {value}".strip()), text) for option, value, text in SHARED_OPTIONS]
    yield from table(_PLAIN_COLUMNS, [*own, *shared])
    yield from ("", "```sh", *component.module.EXAMPLES, "```")
