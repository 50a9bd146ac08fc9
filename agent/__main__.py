"""`gpuledger-agent`: runs on every GPU node. Here the parts are wired, nothing else."""

import os
import sys
from functools import partial

from agent.service import run_agent
from agent.settings import AgentSettings, name_node
from agent.source import Source, find_source
from gpuledger.bus.kafka import KafkaBus
from gpuledger.service import Readiness, explain_user_errors, run_service
from gpuledger.settings import Option, load_settings

_OPTIONS = (
    Option(
        name="--source",
        setting="source",
        help="where readings come from",
        choices=("auto", "nvml", "simulated:FILE"),
    ),
)


@explain_user_errors
def main() -> int:
    """Run the agent until a signal; give the exit code."""
    settings = load_settings(
        AgentSettings,
        prog="gpuledger-agent",
        description="Reads a node's GPUs and their processes and publishes a sample a tick.",
        options=_OPTIONS,
    )
    settings = name_node(settings, os.environ)
    return run_service(partial(_run, source=find_source(settings)), settings=settings)


async def _run(settings: AgentSettings, readiness: Readiness, *, source: Source) -> None:
    await run_agent(
        nvml=source.nvml,
        procfs=source.procfs,
        clock=source.clock,
        bus=KafkaBus(settings.kafka),
        settings=settings,
        readiness=readiness,
    )


if __name__ == "__main__":
    sys.exit(main())
