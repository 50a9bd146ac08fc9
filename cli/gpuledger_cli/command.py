"""`gpuledger`: the command for users. Each subcommand has its own module.

Commands are registered by import path, so that a command loads only its own dependencies.
"""

import os
import re
import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError

from gpuledger import __version__
from gpuledger.errors import BusError, GpuledgerError, UnavailableError, UserError
from gpuledger.settings.secret import mask_addresses
from gpuledger.settings.sources import variable_of
from gpuledger.texts import shorten_middle
from gpuledger_cli.argument_errors import message_of, unknown_command
from gpuledger_cli.help_format import HelpFormatter

USER_ERROR: Final = 2
OWN_ERROR: Final = 5
"""The exit code of an internal error; no command uses it for anything else."""

_HELP: Final = """Account for GPU usage by pod: who used each GPU, how much, and how it is known.

- Try it without a GPU: gpuledger demo
- Bill this month by namespace: gpuledger bill --store gpuledger-store
- Run the agent on a GPU node: gpuledger agent --no-kafka

`gpuledger help COMMAND` describes a command or a component, and `gpuledger config explain` all its
settings.
"""
app = App(
    name="gpuledger",
    version=__version__,
    help=_HELP,
    help_formatter=HelpFormatter(),
    result_action="return_value",
)
# Each help is a copy, because reading it from the module would import the module.
_COMMANDS: Final = {
    "demo": (
        "demo.demo_command:app",
        "Run the whole pipeline in one process and show who uses each GPU.",
    ),
    "topics": (
        "topics:app",
        "Create topics, check topics, print topics and ACLs for other tools.",
    ),
    "doctor": (
        "doctor.doctor_command:app",
        "Check a running installation, and print what to do about each problem.",
    ),
    "watermarks": (
        "watermarks:app",
        "Show the time through which the topics are complete.",
    ),
    "inspect": (
        "inspection.inspect_command:app",
        "Show to whom the GPUs of each node are allocated now, and who uses them.",
    ),
    "cluster": ("cluster:app", "Retire a decommissioned cluster or node."),
    "bill": (
        "bill:app",
        "Calculate what GPUs cost and for whom; close periods, explain line items.",
    ),
    "capacity": (
        "capacity:app",
        "Plan capacity: the size of the fleet, its waste and its future demand.",
    ),
    "replay": (
        "replay.replay_command:app",
        "Run the join again over a time range; write the events or compare them.",
    ),
    "dead-letters": (
        "dead_letters.dead_letters_command:app",
        "List, show and replay records that a component rejected.",
    ),
    "store": ("store:app", "Maintain the store: hourly and daily sums, retention, compaction."),
    "query": ("query:app", "Query the store in SQL, with names and readable units."),
    "autoscale": (
        "autoscale.autoscale_command:app",
        "Check manifests of autoscalers for known mistakes of scaling by GPU use.",
    ),
    "cgroup": (
        "cgroup:app",
        "Show the container, the pod and the job that cgroup lines belong to.",
    ),
    "record-nvml": (
        "record_nvml:app",
        "Record what NVML returns on this machine, to replay it on another.",
    ),
    "compare": (
        "compare.compare_command:app",
        "Compare the metrics of a running dcgm-exporter with those of the agent next to it.",
    ),
    "load": (
        "known_load.load_command:app",
        "Put a known load on a GPU, and print the values that a monitor should show.",
    ),
    "config": ("elsewhere:run", "Explain the settings of a component."),
    "completion": ("completion:app", "Print the completion script of a shell."),
    "help": ("elsewhere:run", "Describe a command or a component."),
}
_COMPONENTS: Final = {
    "agent": "Sample the GPUs of a node, and publish and serve the samples.",
    "podwatch": "Publish the pods, nodes and namespaces of a Kubernetes cluster.",
    "join": "Attribute samples to pods, and publish the events.",
    "sink": "Deliver events to one receiver: remote_write, alerts, store or rows.",
    "reports": "Serve the costs of GPUs over HTTP.",
    "standalone": "Run the whole pipeline in one process, for one machine without Kafka.",
}
for _name, (_path, _help) in _COMMANDS.items():
    app.command(f"gpuledger_cli.{_path}", name=_name, help=_help)
for _name, _help in _COMPONENTS.items():
    app.command("gpuledger_cli.elsewhere:run", name=_name, help=_help, group="Components")
_BARE_GROUPS: Final = (["bill"],)
"""Command groups that also run without a subcommand. Without arguments and without a store in the
environment, they print their help, like other groups."""
_STORE_VARIABLE: Final = variable_of(("store", "uri"))
_KAFKA_SETTING: Final = re.compile(r"\bkafka\.([a-z]+(?:_[a-z]+)*)\b")
_ARGUMENT_CHARACTERS: Final = 120
"""Maximum length of an argument in an error message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    An error is printed in one line on standard error. The code is 2 if the user can fix the error,
    and 5 for an internal error.
    """
    given = sys.argv[1:] if argv is None else [*argv]
    if given in _BARE_GROUPS and _STORE_VARIABLE not in os.environ:
        given.append("--help")
    if not_text := [argument for argument in given if not _is_text(argument)]:
        sys.stderr.write(f"gpuledger: invalid argument: {not_text[0]!a}; it is not UTF-8\n")
        return USER_ERROR
    if message := unknown_command(app, given):
        sys.stderr.write(f"gpuledger: {_one_line(message, given)}\n")
        return USER_ERROR
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # Rich would take it as a width of 0
    try:
        result = app(given, exit_on_error=False, print_error=False)
    except (CycloptsError, UserError, UnavailableError) as error:
        message = message_of(error) if isinstance(error, CycloptsError) else str(error)
        if isinstance(error, BusError):
            message = _KAFKA_SETTING.sub(_kafka_option, message)
        sys.stderr.write(f"gpuledger: {_one_line(message, given)}\n")
        return USER_ERROR
    except GpuledgerError as error:
        message = _one_line(str(error), given)
        sys.stderr.write(f"gpuledger: internal error, please report it: {message}\n")
        return OWN_ERROR
    return result if isinstance(result, int) else 0


def _is_text(argument: str) -> bool:
    """Return whether an argument was valid UTF-8: Python keeps other bytes as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _one_line(message: str, given: Sequence[str]) -> str:
    """Return a message in one line, without credentials, with long arguments shortened."""
    # A URL in an argument may have credentials, and cyclopts quotes invalid arguments.
    line = mask_addresses(" ".join(message.split()))
    for argument in given:
        for part in (argument, argument.partition("=")[2]):
            text = " ".join(part.split())
            if len(text) > _ARGUMENT_CHARACTERS:
                line = line.replace(text, shorten_middle(text, _ARGUMENT_CHARACTERS))
    return line


def _kafka_option(setting: re.Match[str]) -> str:
    """Return the option or variable of a Kafka setting, for commands without a settings file."""
    variable = variable_of(("kafka", setting[1]))
    return f"--bootstrap-servers or {variable}" if setting[1] == "bootstrap_servers" else variable
