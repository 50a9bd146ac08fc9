"""`gpuledger`: the command for people. Each subcommand stands in a module of its own.

The modules are named by their paths, so that one command does not load what another needs.
"""

import sys
from collections.abc import Sequence
from typing import Final

from cyclopts import App, CycloptsError

from gpuledger import __version__
from gpuledger.errors import GpuledgerError, UnavailableError, UserError
from gpuledger.settings.secret import mask_addresses
from gpuledger_cli.demo.tables import as_help

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
    "gpuledger_cli.demo.demo_command:demo",
    name="demo",
    help="Watch the whole pipeline at work on one screen.",
    help_epilogue=as_help(),
)
_COMMANDS: Final = {
    "topics": ("topics:app", "Make the topics on a Kafka broker, or check those there."),
    "bill": ("bill:app", "Say what GPUs cost, by whom, and how each line was calculated."),
    "replay": (
        "replay.replay_command:app",
        "Join the ticks of a time range again, and compare with the first run.",
    ),
    "dead-letters": (
        "dead_letters.dead_letters_command:app",
        "List what could not be used, show it, and put it back.",
    ),
    "store": ("store:app", "Maintain the store: rollups, retention, compaction."),
    "query": ("query:query", "Ask the store in SQL, names and readable units included."),
    "cgroup": ("cgroup:cgroup", "Show the container and the pod that cgroup lines mean."),
    "record-nvml": (
        "record_nvml:record_nvml",
        "Write down what this machine's NVML answers, to play it elsewhere.",
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
"""Command lines that name only a group with a command of its own: what they lack is most of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give the exit code.

    2, with one line, for what its user can put right; 5, with one line, for a mistake of ours.
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
        sys.stderr.write(f"gpuledger: {mask_addresses(' '.join(str(error).split()))}\n")
        return USER_ERROR
    except GpuledgerError as error:
        said = mask_addresses(" ".join(str(error).split()))
        sys.stderr.write(f"gpuledger: a mistake of gpuledger's own, please report it: {said}\n")
        return OWN_ERROR
    return result if isinstance(result, int) else 0
