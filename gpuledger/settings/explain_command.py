"""`gpuledger config explain COMPONENT [PREFIX]`: help on all or some settings of a component.

It imports only the module with the component's settings, whose name is in a table.
"""

import argparse
import sys
from importlib import import_module
from typing import Final, NoReturn

import msgspec
from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.settings.command_line import HelpStyle, name_groups
from gpuledger.settings.explanation import explain, explain_all
from gpuledger.settings.secret import mask_texts
from gpuledger.settings.sources import settings_of
from gpuledger.texts import find_near

_USER_ERROR: Final = 2
SETTINGS_CLASSES: Final = {
    "agent": ("gpuledger_agent.settings", "AgentSettings"),
    "podwatch": ("gpuledger_enricher.podwatch.pod_settings", "PodwatchSettings"),
    "join": ("gpuledger_enricher.join.join_settings", "JoinSettings"),
    "sink": ("gpuledger_sinks.settings", "SinkSettings"),
    "reports": ("gpuledger_reports.settings", "ReportsSettings"),
    "standalone": ("gpuledger_cli.standalone.standalone_settings", "StandaloneSettings"),
}
_EXAMPLES: Final = """\
Examples:
  gpuledger config explain agent
  gpuledger config explain sink store
  gpuledger config explain join kafka.sasl_mechanism
  gpuledger config explain agent sampling

Exit codes:
  0    printed
  2    invalid arguments, or a missing extra
"""


def main() -> int:
    """Run the command line; return the exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args()
        if arguments.command is None:
            parser.print_help()
        else:
            sys.stdout.write(settings_text(arguments.component, arguments.prefix))
    except SettingsError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return _USER_ERROR
    return 0


def settings_text(component: str, prefix: str = "") -> str:
    """Return the help on all settings of a component, or on those that match a prefix.

    A prefix is a setting, a group such as `kafka`, an environment variable, or a part of a name.
    Raises `SettingsError` if no setting matches.
    """
    module, name = SETTINGS_CLASSES[component]
    model: type[msgspec.Struct] = getattr(import_module(module), name)
    settings = settings_of(model)
    if not prefix:
        return explain_all(settings)
    path = tuple(prefix.split("."))
    found = (
        [setting for setting in settings if setting.path[: len(path)] == path]
        or [setting for setting in settings if setting.variable == prefix]
        or [setting for setting in settings if prefix in setting.name]
    )
    if not found:
        names = [".".join(each.path[:end]) for each in settings for end in (1, len(each.path))]
        near = find_near(prefix, names)
        remedy = f"did you mean {near}?" if near else f"run `gpuledger config explain {component}`"
        raise SettingsError(f"PREFIX: unknown setting of {component}: {prefix!r}; {remedy}")
    return explain(found)


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        problem = mask_texts(message.removeprefix("argument "), sys.argv[1:])
        raise SettingsError(f"{problem}; see `{self.prog} --help`")


def _parser() -> _Parser:
    parser = _Parser(
        prog="gpuledger config",
        description="Explain the settings of a component.",
        formatter_class=HelpStyle,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    described = commands.add_parser(
        "explain",
        help="print settings with their defaults, variables and meanings",
        description="Print the settings of a component: default, environment variable, meaning.",
        epilog=_EXAMPLES,
        formatter_class=HelpStyle,
    )
    for each in (parser, described):
        name_groups(each)
    described.add_argument(
        "component",
        choices=tuple(SETTINGS_CLASSES),
        metavar="COMPONENT",
        help=", ".join(SETTINGS_CLASSES),
    )
    described.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX",
        help="setting, group, variable or part of a name",
    )
    return parser
