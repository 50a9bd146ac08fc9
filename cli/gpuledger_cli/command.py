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

app = App(
    name="gpuledger",
    version=__version__,
    help="For every GPU and every second: who used it, how much, and how we know.",
    result_action="return_value",
)
# The help stands here as well, because asking the module for it would load it.
app.command(
    "gpuledger_cli.demo.demo_command:demo",
    name="demo",
    help="Watch the whole pipeline at work on one screen.",
    help_epilogue=as_help(),
)
app.command(
    "gpuledger_cli.topics:app",
    name="topics",
    help="Make the topics on a Kafka broker, or check those there.",
)
app.command(
    "gpuledger_cli.bill:app",
    name="bill",
    help="Say what GPUs cost, by whom, and how each line was calculated.",
)
app.command(
    "gpuledger_cli.replay.replay_command:app",
    name="replay",
    help="Join the ticks of a time range again, and compare with the first run.",
)
app.command(
    "gpuledger_cli.dead_letters.dead_letters_command:app",
    name="dead-letters",
    help="List what could not be used, show it, and put it back.",
)
app.command(
    "gpuledger_cli.store:app",
    name="store",
    help="Maintain the store: rollups, retention, compaction.",
)
app.command(
    "gpuledger_cli.query:query",
    name="query",
    help="Ask the store in SQL, names and readable units included.",
)
app.command(
    "gpuledger_cli.cgroup:cgroup",
    name="cgroup",
    help="Show the container and the pod that cgroup lines mean.",
)
app.command(
    "gpuledger_cli.record_nvml:record_nvml",
    name="record-nvml",
    help="Write down what this machine's NVML answers, to play it elsewhere.",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give the exit code.

    2, with one line, for what its user can put right; 5, with one line, for a mistake of ours.
    """
    try:
        result = app(argv, exit_on_error=False, print_error=False)
    except (CycloptsError, UserError, UnavailableError) as error:
        # An address in an argument may hold a login, and cyclopts quotes what it refuses.
        sys.stderr.write(f"gpuledger: {mask_addresses(' '.join(str(error).split()))}\n")
        return USER_ERROR
    except GpuledgerError as error:
        said = mask_addresses(" ".join(str(error).split()))
        sys.stderr.write(f"gpuledger: a mistake of gpuledger's own, please report it: {said}\n")
        return OWN_ERROR
    return result if isinstance(result, int) else 0
