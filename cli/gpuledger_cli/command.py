"""`gpuledger`: the command for people. Each subcommand stands in a module of its own.

The modules are named by their paths, so that one command does not load what another needs.
"""

import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError, MissingArgumentError

from gpuledger import __version__
from gpuledger.errors import GpuledgerError, UnavailableError, UserError
from gpuledger.settings.secret import mask_addresses

USER_ERROR: Final = 2
OWN_ERROR: Final = 5
"""Of no command's own codes: what it was about is not done, and its user can change nothing."""

_HELP: Final = """For every GPU and every second: who used it, how much, and how we know.

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
    result_action="return_value",
)
# The help stands here as well, because asking the module for it would load it.
app.command(
    "gpuledger_cli.demo.demo_command:app",
    name="demo",
    help="Run the whole pipeline in one process and show who uses each GPU.",
)
_COMMANDS: Final = {
    "topics": (
        "topics:app",
        "Create topics, check topics, print topics and ACLs for other tools.",
    ),
    "watermarks": (
        "watermarks:app",
        "Show the time through which the topics are complete.",
    ),
    "cluster": ("cluster:app", "Retire a cluster or a node that is gone."),
    "bill": (
        "bill:app",
        "Calculate what GPUs cost and for whom; close periods, explain line items.",
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
    "cgroup": (
        "cgroup:app",
        "Show the container, the pod and the job that cgroup lines belong to.",
    ),
    "record-nvml": (
        "record_nvml:app",
        "Record what NVML returns on this machine, to replay it on another.",
    ),
    "config": ("elsewhere:run", "Explain the settings of a component."),
    "completion": ("completion:app", "Print the completion script of a shell."),
}
_COMPONENTS: Final = {
    "agent": "Sample the GPUs of a node, and publish and serve the samples.",
    "podwatch": "Publish the pods, nodes and namespaces of a Kubernetes cluster.",
    "join": "Attribute samples to pods, and publish the events.",
    "sink": "Deliver events to one receiver: remote_write, alerts, store or rows.",
    "reports": "Serve the costs of GPUs over HTTP.",
}
for _name, (_path, _help) in _COMMANDS.items():
    app.command(f"gpuledger_cli.{_path}", name=_name, help=_help)
for _name, _help in _COMPONENTS.items():
    app.command("gpuledger_cli.elsewhere:run", name=_name, help=_help, group="Components")
_BARE_GROUPS: Final = (["bill"],)
"""Groups that are commands too. Without arguments they print help, as other groups do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give the exit code.

    2, with one line, for what its user can put right; 5, with one line, for an internal error.
    """
    given = sys.argv[1:] if argv is None else [*argv]
    if given in _BARE_GROUPS:
        given.append("--help")
    if given and not given[0].startswith("-") and given[0] not in app:
        del given[1:]  # with --help there it would be answered by the help of `gpuledger`
    try:
        result = app(given, exit_on_error=False, print_error=False)
    except (CycloptsError, UserError, UnavailableError) as error:
        # An address in an argument may hold a login, and cyclopts quotes what it refuses.
        text = mask_addresses(" ".join(str(error).split()))
        sys.stderr.write(f"gpuledger: {text}{_name_variables(error)}\n")
        return USER_ERROR
    except GpuledgerError as error:
        message = mask_addresses(" ".join(str(error).split()))
        sys.stderr.write(f"gpuledger: internal error, please report it: {message}\n")
        return OWN_ERROR
    return result if isinstance(result, int) else 0


def _name_variables(error: Exception) -> str:
    """Return the environment variables that can take the place of a missing option."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return ""
    names = error.argument.parameter.env_var
    return f" Set it, or {' or '.join(names)}." if names else ""
