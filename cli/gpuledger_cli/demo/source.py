"""The GPUs that the demo reads: simulated ones, or this machine's.

Both look the same to the pipeline: nodes, a clock, the tasks to start, and the true usage if known.
"""

import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Protocol

from gpuledger.bus.protocol import Bus
from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger.keys import key_in, split_key
from gpuledger.runtime import Readiness
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.settings import AgentSettings, SpoolSettings, name_node
from gpuledger_agent.source_selection import open_source, play
from gpuledger_cli.demo.plan import DemoPlan
from gpuledger_cli.demo.totals import Tally
from gpuledger_cli.in_process.stages import Stages
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_enricher.podwatch.pod_watch import run_podwatch
from gpuledger_simulator.clock import ScaledClock
from gpuledger_simulator.kube import serve_kube_api
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation

# The in-memory bus is always available, and the demo must not use the spool of a real agent.
_NO_SPOOL: Final = SpoolSettings(directory="")


class DemoSource(Protocol):
    """Nodes with GPUs, and the API server that has their pods."""

    headline: str
    """Description in one line."""
    is_simulated: bool
    """Whether a scenario is played."""
    clock: Clock
    """The clock of its events."""

    async def start(self, stages: Stages, *, bus: Bus, stack: AsyncExitStack) -> None:
        """Start the agents and podwatch of this source."""

    def truth(self, tally: Tally) -> dict[str, float] | None:
        """Return each pod's true busy seconds in the time that ticks cover; `None` if unknown."""


class SimulatedMachine:
    """The nodes of a scenario. The scenario begins with `start`, when the brokers are ready."""

    is_simulated = True
    _simulation: Simulation

    def __init__(self, scenario: Path, *, cluster: str) -> None:
        self._cluster = cluster
        self._scenario = load_scenario(scenario)
        self.headline = f"scenario {self._scenario.name}"
        self.clock: Clock = ScaledClock(epoch_ns=time.time_ns(), speed=self._scenario.speed)

    async def start(self, stages: Stages, *, bus: Bus, stack: AsyncExitStack) -> None:
        """Start an agent for each node, and podwatch on the simulator's own API server."""
        self._simulation = Simulation(
            self._scenario, epoch_ns=self.clock.time_ns(), clock=self.clock
        )
        for node in self._simulation.nodes.values():
            stages.start_agent(
                f"the agent of {node.name}",
                run_agent(
                    host=play(node),
                    bus=bus,
                    settings=AgentSettings(
                        cluster=self._cluster, node_name=node.name, spool=_NO_SPOOL
                    ),
                    readiness=Readiness(),
                ),
            )
        url = await stack.enter_async_context(serve_kube_api(self._simulation))
        settings = PodwatchSettings(cluster=self._cluster, kubernetes=KubernetesSettings(url=url))
        await _start_podwatch(stages, settings, bus=bus, stack=stack, clock=self.clock)

    def truth(self, tally: Tally) -> dict[str, float]:
        """Sum the scenario's true usage over the time that each node's ticks cover."""
        found: dict[str, float] = {}
        for node, stretches in tally.covered_ns.items():
            name = split_key(node)[1]
            for start, end in stretches:
                for usage in self._simulation.truth(start, end, name):
                    pod = key_in(self._cluster, usage.uid)
                    found[pod] = found.get(pod, 0.0) + usage.busy_seconds
        return found


class OwnMachine:
    """This machine and its GPUs."""

    is_simulated = False

    def __init__(self, machine: Host, *, cluster: str) -> None:
        self._machine = machine
        self._settings = name_node(AgentSettings(cluster=cluster, spool=_NO_SPOOL), os.environ)
        self.headline = f"the GPUs of {self._settings.node_name}"
        self.clock: Clock = machine.clock

    async def start(self, stages: Stages, *, bus: Bus, stack: AsyncExitStack) -> None:
        """Start the agent, and podwatch if an API server is configured."""
        stages.start_agent(
            "the agent",
            run_agent(
                host=self._machine,
                bus=bus,
                settings=self._settings,
                readiness=Readiness(),
            ),
        )
        # Without an API server only the names of pods are missing.
        watched = PodwatchSettings(cluster=self._settings.cluster)
        if watched.kubernetes.is_configured(os.environ):
            await _start_podwatch(stages, watched, bus=bus, stack=stack, clock=self.clock)

    def truth(self, tally: Tally) -> None:
        """Return `None`: the true usage of real GPUs is unknown."""


async def find_machine(plan: DemoPlan) -> DemoSource:
    """Return the source that the plan selects; raises `UserError` if NVML is not available."""
    if plan.source == "simulated":
        return SimulatedMachine(plan.scenario, cluster=plan.cluster)
    try:
        return OwnMachine(await open_source(AgentSettings(source="auto")), cluster=plan.cluster)
    except UserError as error:
        # A user who selected real GPUs must not see simulated ones.
        if plan.source == "auto":
            return SimulatedMachine(plan.scenario, cluster=plan.cluster)
        raise UserError(
            "--source nvml: NVML is not available on this machine; install the driver, or use"
            " --source simulated"
        ) from error


async def _start_podwatch(
    stages: Stages,
    settings: PodwatchSettings,
    *,
    bus: Bus,
    stack: AsyncExitStack,
    clock: Clock,
) -> None:
    api = await stack.enter_async_context(open_api(settings.kubernetes))
    stages.start(
        "podwatch",
        run_podwatch(api=api, bus=bus, settings=settings, readiness=Readiness(), clock=clock),
    )
