"""A run of the topology: started, played for a while, with a window to examine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import yaml

from gpuledger_simulator.scenario.load import load_scenario
from tests.real.compose.expected import OF_THE_COMPONENTS
from tests.real.compose.panel_queries import Grafana, Shown
from tests.real.compose.topology import SERVICES, Topology
from tests.real.compose.truth import Truth
from tests.real.services.prometheus import PrometheusApi
from tests.unit.deployment import dashboard

if TYPE_CHECKING:
    from collections.abc import Collection

TURNOVER_SECONDS: Final = 13
"""By then the scenario's batch job has ended and the next one runs."""
SETTLED_SECONDS: Final = 2
WINDOW_SECONDS: Final = 8
WAIT_SECONDS: Final = 120.0
UNNAMED: Final = 'gpuledger_pod_gpu_busy_ratio{namespace=""}'


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run of the topology, and a window in which no pod starts or ends."""

    topology: Topology
    prometheus: PrometheusApi
    epoch_ns: int
    end: int
    """The window's last second."""

    @property
    def window(self) -> range:
        return range(self.end - WINDOW_SECONDS + 1, self.end + 1)

    @property
    def whole(self) -> range:
        """The seconds since the scenario began."""
        return range(self.epoch_ns // 10**9, self.end + 1)

    @property
    def truth(self) -> Truth:
        service = SERVICES["agent-1"]
        source = self.topology.environment(service)["GPULEDGER_SOURCE"]
        scenario = load_scenario(source.removeprefix("simulated:"))
        start = self.end - WINDOW_SECONDS
        return Truth(scenario, epoch_ns=self.epoch_ns, start=start, end=self.end)

    def show(self, title: str, seconds: range) -> list[Shown]:
        grafana = Grafana(self.prometheus)
        targets = [target for target in dashboard.targets() if target.panel == title]
        return [one for target in targets for one in grafana.show(target, seconds)]

    def show_all_of(self, title: str, names: Collection[str]) -> list[Shown]:
        """Show the window of a panel; a panel of scraped values once all names are there."""
        if title not in OF_THE_COMPONENTS:
            return self.show(title, self.window)
        end_seconds = time.monotonic() + WAIT_SECONDS
        while True:
            now = int(time.time())
            shown = self.show(title, range(now - WINDOW_SECONDS, now))
            if set(names) <= {one.name for one in shown} or time.monotonic() > end_seconds:
                return shown
            time.sleep(0.5)


def play(topology: Topology) -> Played:
    """Start everything, podwatch last, and wait until a window of the scenario is in Prometheus."""
    prometheus = PrometheusApi(url=f"http://{topology.places.address('prometheus', 9090)}")
    topology.start(without={"podwatch"})
    prometheus.await_query(UNNAMED, deadline_seconds=WAIT_SECONDS)
    topology.start_one("podwatch")
    topology.wait_until_ready()
    named_seconds = _await_none(prometheus, UNNAMED)
    epoch_ns = _epoch_ns(topology)
    turned_seconds = epoch_ns // 10**9 + TURNOVER_SECONDS
    end = max(named_seconds, turned_seconds) + SETTLED_SECONDS + WINDOW_SECONDS
    # Every node's ticks up to the window's end are there, however long they took.
    newest = f"min(max by (node) (timestamp(gpuledger_gpu_memory_total_bytes))) > {end}"
    prometheus.await_query(newest, deadline_seconds=WAIT_SECONDS)
    return Played(topology=topology, prometheus=prometheus, epoch_ns=epoch_ns, end=end)


def _epoch_ns(topology: Topology) -> int:
    reported = yaml.safe_load((topology.places.volume("simulation") / "agent.yaml").read_text())
    return int(reported["simulator"]["epoch_ns"])


def _await_none(prometheus: PrometheusApi, query: str) -> int:
    """Wait until a query has no result; return the time since the epoch in seconds."""
    end_seconds = time.monotonic() + WAIT_SECONDS
    while prometheus.query(query):
        assert time.monotonic() < end_seconds, f"still a result after {WAIT_SECONDS} s: {query}"
        time.sleep(0.1)
    return int(time.time())
