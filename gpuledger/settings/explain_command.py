"""`gpuledger config explain COMPONENT [PREFIX]`: help on all or some settings of a component.

It imports only the module with the component's settings, whose name is in a table.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import msgspec

from gpuledger.errors import SettingsError
from gpuledger.settings.command_line import OneLineParser
from gpuledger.settings.explanation import explain, explain_all
from gpuledger.settings.secret import mask_texts
from gpuledger.settings.sources import settings_of
from gpuledger.texts import find_near, find_remedy

_USER_ERROR: Final = 2
_COMMAND: Final = "explain"
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
_MIN_SIMILARITY: Final = 0.65
"""Required similarity of a suggestion; with 0.6, `retention` would suggest `store.generation`."""


def main() -> int:
    """Run the command line; return the exit code."""
    given = sys.argv[1:]
    try:
        sys.stdout.write(_answer(given))
    except SettingsError as error:
        sys.stderr.write(f"gpuledger config: {mask_texts(str(error), given)}\n")
        return _USER_ERROR
    return 0


def _answer(given: Sequence[str]) -> str:
    """Return the text for a command line; raises `SettingsError` if it is invalid."""
    parser = _parser()
    if not given:
        return parser.format_help()
    if given[0] == _COMMAND:
        given = given[1:]
    elif not given[0].startswith("-"):
        remedy = parser.suggest(find_near(given[0], [_COMMAND]))
        raise SettingsError(f"unknown command: {given[0]}; {remedy}")
    arguments = parser.parse_args(given)
    if arguments.component not in SETTINGS_CLASSES:
        value = arguments.component
        problem = f"invalid value {value!r}" if value else "missing"
        raise SettingsError(f"COMPONENT: {problem}; {find_remedy(value, [*SETTINGS_CLASSES])}")
    return settings_text(arguments.component, arguments.prefix)


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
        near = find_near(prefix, names, cutoff=_MIN_SIMILARITY)
        remedy = f"did you mean {near}?" if near else f"run `gpuledger config explain {component}`"
        raise SettingsError(f"PREFIX: unknown setting of {component}: {prefix!r}; {remedy}")
    return explain(found)


def _parser() -> OneLineParser:
    prog = f"gpuledger config {_COMMAND}"
    parser = OneLineParser(
        prog=prog,
        description="Print the settings of a component: default, environment variable, meaning.",
        usage=f"{prog} [-h] COMPONENT [PREFIX]",
        epilog=_EXAMPLES,
    )
    # Optional for argparse, because `_answer` reports a missing component with the known ones.
    parser.add_argument(
        "component", nargs="?", default="", metavar="COMPONENT", help=", ".join(SETTINGS_CLASSES)
    )
    parser.add_argument(
        "prefix",
        nargs="?",
        default="",
        metavar="PREFIX",
        help="setting, group, variable or part of a name",
    )
    return parser
