"""The whole pipeline on real parts: three nodes, podwatch, two joins, three sinks."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuledger.clock import NS_PER_SECOND
from tests.real.deployment.chart import render
from tests.real.deployment.rendering import RBAC
from tests.real.end_to_end.components import BIN, Component
from tests.real.services.process import Process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from gpuledger_simulator.simulation import Simulation
    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.kafka import KafkaBroker
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.prometheus import PrometheusApi

NAMESPACE: Final = "gpuledger"
JOINS: Final = 2
UIDS_FILE: Final = "uids.json"
AHEAD_SECONDS: Final = 40


@dataclass(frozen=True, kw_only=True)
class RealParts:
    """The parts that the pipeline connects to."""

    kafka: KafkaBroker
    kube_api: KubeApiClient
    prometheus: PrometheusApi
    alertmanager: AlertmanagerApi


def begin_ns(kafka: KafkaBroker) -> int:
    """Create the topics as an operator would; return when the scenario is to begin.

    Its driver has until then to create the first pods: a container does not run before its pod
    exists.
    """
    command = [str(BIN / "gpuledger"), "topics", "create"]
    command += ["--bootstrap-servers", kafka.bootstrap_servers]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return time.time_ns() + AHEAD_SECONDS * NS_PER_SECOND


class Pipeline:
    """All components of one run of a scenario."""

    def __init__(
        self, *, parts: RealParts, simulation: Simulation, scenario: Path, folder: Path
    ) -> None:
        self.parts = parts
        self.store = folder / "store"
        self._simulation = simulation
        self._scenario = scenario
        self._folder = folder
        self._uids = folder / UIDS_FILE
        self.agents = [self._agent(name) for name in simulation.nodes]
        self.podwatch = self._podwatch()
        self.joins = [self._join(number) for number in range(JOINS)]
        self.sinks = self._make_sinks()
        self._driver = self._drive()

    def start(self) -> None:
        """Start everything; return when everything is ready."""
        self._driver.start()
        # The scenario's first pods must not wait for all others to start.
        self._driver.wait_until(self._uids.exists, deadline_seconds=60)
        for component in self.everything():
            component.start()
        for component in self.everything():
            component.wait_until_ready()

    def everything(self) -> Iterator[Component]:
        """Yield all components, upstream first."""
        yield from (*self.agents, self.podwatch, *self.joins, *self.sinks)

    def end(self) -> dict[str, int | None]:
        """End everything, upstream first; return the exit codes."""
        statuses = {component.name: component.stop() for component in self.everything()}
        self._driver.stop()
        return statuses

    def kill(self) -> None:
        """Kill all processes."""
        with ExitStack() as stack:
            stack.callback(self._driver.kill)
            for component in self.everything():
                stack.callback(component.kill)

    def wait_for_second(self, second: float) -> None:
        """Wait until the scenario has reached this second."""
        wanted_ns = self._simulation.epoch_ns + round(second * 1e9)
        time.sleep(max(0.0, (wanted_ns - time.time_ns()) / 1e9))

    def _component(self, name: str, *command: str, **environment: str) -> Component:
        servers = self.parts.kafka.bootstrap_servers
        return Component(
            name=name,
            command=list(command),
            folder=self._folder / name,
            environment={"KAFKA__BOOTSTRAP_SERVERS": servers, **environment},
        )

    def _agent(self, node: str) -> Component:
        spool = self._folder / f"spool-{node}"
        spool.mkdir()
        settings = {
            "NODE_NAME": node,
            "SPOOL__DIRECTORY": str(spool),
            "SOURCE": f"simulated:{self._scenario}",
            "SIMULATOR__EPOCH_NS": str(self._simulation.epoch_ns),
            "SIMULATOR__UIDS_FILE": str(self._uids),
        }
        return self._component(f"agent-{node}", "gpuledger", "agent", **settings)

    def _podwatch(self) -> Component:
        """Watch with only the permissions of the manifests."""
        kube_api = self.parts.kube_api
        kube_api.create_namespace(NAMESPACE)
        for manifest in render().of_kind(*RBAC):
            kube_api.apply(manifest)
        file = kube_api.service_account_kubeconfig(namespace=NAMESPACE, name="gpuledger-podwatch")
        settings = {"KUBERNETES__KUBECONFIG": str(file)}
        return self._component("podwatch", "gpuledger", "podwatch", **settings)

    def _join(self, number: int) -> Component:
        name = f"join-{number}"
        settings = {"KAFKA__GROUP_INSTANCE_ID": name, "KAFKA__SESSION_TIMEOUT_SECONDS": "6"}
        return self._component(name, "gpuledger", "join", **settings)

    def _make_sinks(self) -> list[Component]:
        parts = self.parts
        settings = {
            "remote_write": {"REMOTE_WRITE__URL": parts.prometheus.remote_write_url},
            "alerts": {"ALERTS__URLS": parts.alertmanager.url},
            "store": {
                "STORE__URI": str(self.store),
                "STORE__ENTRIES": "true",
                "STORE__FLUSH_SECONDS": "5",
            },
        }
        return [
            self._component(kind, "gpuledger", "sink", kind, **section)
            for kind, section in settings.items()
        ]

    def _drive(self) -> Process:
        """Play the kubelets and the controllers against the API server."""
        arguments = ["--scenario", str(self._scenario), "--uids", str(self._uids)]
        arguments += ["--epoch-ns", str(self._simulation.epoch_ns)]
        arguments += ["--kubeconfig", str(self.parts.kube_api.kubeconfig)]
        argv = [str(BIN / "python"), "-m", "gpuledger_simulator", "drive", *arguments]
        return Process(name="driver", argv=argv, folder=self._folder / "driver")
