"""The documented queries and the dashboard, on a real Prometheus, against the bill of one run.

The scenario has whole GPUs, shares of a GPU, and a GPU that is partitioned and repartitioned. The
records of pods arrive late, so that pods have series without names at first, and one pod has no
team. The result of a pod is that of a query at the last tick of its node, whose range begins before
the first tick, so that Prometheus has nothing to extrapolate.
"""

from __future__ import annotations

import asyncio
import json
import re
import textwrap
import time
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml
from deltalake import DeltaTable
from msgspec.structs import replace

from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of
from gpuledger.keys import node_key
from gpuledger.ledger.series import EventSeries, SentLabels
from gpuledger.records import GpuEvent
from gpuledger.store.commits import mark_complete
from gpuledger.store.schema import table_uri
from gpuledger.store.usage_schema import USAGE
from gpuledger_reports.presenting.output import as_json
from gpuledger_reports.pricing.billing import BillMaker
from gpuledger_reports.pricing.policy_file import ReadPolicy, parse_policy
from gpuledger_reports.reading.times import Window
from gpuledger_reports.reading.usage_sums import UsageReader
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.node_intervals import NodeIntervals
from gpuledger_sinks.remote_write.write_client import open_client
from gpuledger_sinks.settings import RemoteWriteSettings
from tests.default_topics import EVENTS
from tests.month import pod_records_of
from tests.unit.attribution.test_hour import store_pods, ticks_of
from tests.unit.deployment import dashboard
from tests.unit.deployment.components import ROOT
from tests.unit.enricher.join.builders import Given
from tests.unit.enricher.join.ticks import record
from tests.unit.sinks.store.storing import fill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gpuledger.records import PodRecord
    from tests.real.services.prometheus import PrometheusApi

CLUSTER: Final = "recipes"
"""The label that separates this test's series from those of others in the same Prometheus."""
SECONDS: Final = 90
LATE_SECONDS: Final = 10
SECOND_NS: Final = 10**9
DAY_US: Final = 86_400_000_000
PRICES: Final = "prices: [{name: any, model: '*', per_gpu_hour: 3600}]\n"
"""One unit of currency per second."""
WITHOUT_TEAM: Final = "notebook-b-0"
NO_TEAM: Final = "__unallocated__"
"""The bill's name of a pod without a team."""
GUIDES: Final = ROOT / "docs" / "guides"
QUERIES: Final = (GUIDES / "prometheus.md").read_text()
TEAMS: Final = (GUIDES / "labels-and-teams.md").read_text()
AUTOSCALING: Final = (GUIDES / "autoscaling.md").read_text()
RATE_SECONDS: Final = 300
"""The range of the documented rates, which covers the run."""
Amounts = dict[str, float]
"""Amounts by namespace, pod, owner or team."""


def recipe(after: str, page: str = QUERIES) -> str:
    """Return the first documented query after a text."""
    found = re.search(re.escape(after) + r".*?```promql\n(.*?)```", page, re.DOTALL)
    assert found, after
    return textwrap.dedent(found[1])


@dataclass(frozen=True, kw_only=True)
class Run:
    """A played scenario, in Prometheus and in a store."""

    prometheus: PrometheusApi
    store: Path
    begin_us: int
    ends_seconds: Mapping[str, float]
    """Time of the last tick of each node."""
    nodes: Mapping[str, str]
    """The node of each namespace, pod, owner and team, of which each has only one."""

    def query(self, promql: str, name_of: Callable[[Mapping[str, str]], str]) -> Amounts:
        """Return a query's results at the end of each node, by name, without zeros."""
        found: Amounts = {}
        for node, end_seconds in self.ends_seconds.items():
            for labels, value in self._results(promql, end_seconds):
                if value and self.nodes[name := name_of(labels)] == node:
                    assert name not in found
                    found[name] = value
        return found

    def labels(self, promql: str) -> list[dict[str, str]]:
        """Return the labels of a query's results at the end of the last node."""
        return [labels for labels, _ in self._results(promql, max(self.ends_seconds.values()))]

    def total(self, promql: str) -> float:
        """Return the total of a query's results at the end of the last node."""
        return sum(value for _, value in self._results(promql, max(self.ends_seconds.values())))

    def _results(self, promql: str, time_seconds: float) -> Iterator[tuple[dict[str, str], float]]:
        asked = urllib.parse.urlencode({"query": promql, "time": time_seconds})
        answer = self.prometheus.fetch(f"/api/v1/query?{asked}").json()
        assert answer["status"] == "success", answer
        for one in answer["data"]["result"]:
            if one["metric"]["cluster"] == CLUSTER:
                yield one["metric"], float(one["value"][1])

    def billed(self, by: str, field: str) -> Amounts:
        """Return a column of the bill of the run, by tenant, without zeros."""
        read = ReadPolicy(parse_policy(PRICES), "0" * 64, "recipes")
        maker = BillMaker(UsageReader(str(self.store)), read, by=[by])
        day_us = self.begin_us // DAY_US * DAY_US
        bill = json.loads(as_json(maker.make(Window(day_us, day_us + 2 * DAY_US))))
        lines = {line[by]: line for line in bill["lines"] if line["idle_kind"] is None}
        return {name: amount for name, line in lines.items() if (amount := float(line[field]))}


def pod_records(simulation: Simulation) -> Iterator[tuple[int, PodRecord]]:
    """Yield the records of pods, each with the time at which it arrives."""
    for one in pod_records_of(simulation, CLUSTER):
        labels = {} if one.name == WITHOUT_TEAM else {"team": f"team-{one.namespace}"}
        yield one.created_time_ns + LATE_SECONDS * SECOND_NS, replace(one, labels=labels)


def names_and_nodes(pods: Sequence[PodRecord]) -> Iterator[tuple[str, str]]:
    for one in pods:
        team = (one.labels or {}).get("team", NO_TEAM)
        for name in (one.namespace, one.name, f"{one.owner_kind}/{one.owner_name}", team):
            yield name, one.node


async def played(simulation: Simulation, pods: list[tuple[int, PodRecord]]) -> list[GpuEvent]:
    """Return the events of all nodes in order of time."""
    ticks = [
        tick
        for node in simulation.nodes
        for tick in await ticks_of(simulation, node, CLUSTER, seconds=SECONDS, tick_seconds=1.0)
    ]
    given, waiting = Given(), list(pods)
    decode = decoder_of(EVENTS.name, GpuEvent).decode
    events = []
    for offset, tick in enumerate(sorted(ticks, key=lambda one: one.time_ns)):
        given.now_ns = tick.time_ns
        while waiting and waiting[0][0] <= tick.time_ns:
            given.read_pod(waiting.pop(0)[1])
        made = given.stage.take_samples([record(tick, offset=offset)])
        events += [decode(message.value) for message in made]
    assert len(events) == len(ticks)
    return events


async def send(events: list[GpuEvent], prometheus: PrometheusApi) -> None:
    """Write the series of each tick, as the sink does with intervals of one tick."""
    values, series = EventSeries(SentLabels(pods=("team",))), ActiveSeries()
    nodes: dict[str, NodeIntervals] = {}
    settings = RemoteWriteSettings(url=prometheus.remote_write_url)
    async with open_client(settings) as client:
        for offset, event in enumerate(events):
            node = nodes.setdefault(
                event.node, NodeIntervals(node_key(event), values=values, interval_ns=0)
            )
            of_event = Record(EVENTS.name, 0, offset, 0, None, None)
            for samples in node.add(event, of_event, is_past=False):
                # Incidents are sent apart, and no recipe of GPU-hours reads them.
                if not samples.is_of_incidents:
                    await client.write(series.encode(samples), attempt=0)


@pytest.fixture(scope="module")
def run(prometheus: PrometheusApi, tmp_path_factory: pytest.TempPathFactory) -> Run:
    epoch_ns = (int(time.time()) - SECONDS - 10) * SECOND_NS
    simulation = Simulation(
        load_scenario(ROOT / "scenarios" / "sharing.yaml"),
        epoch_ns=epoch_ns,
        clock=ManualClock(start_ns=epoch_ns),
    )
    pods = sorted(pod_records(simulation), key=lambda due: due[0])
    events = asyncio.run(played(simulation, pods))
    asyncio.run(send(events, prometheus))
    store = tmp_path_factory.mktemp("recipes")
    fill(store, events)
    store_pods(store, pods)
    mark_complete(DeltaTable(table_uri(str(store), USAGE.name)), epoch_ns // 1000 + 2 * DAY_US)
    return Run(
        prometheus=prometheus,
        store=store,
        begin_us=epoch_ns // 1000,
        ends_seconds={event.node: event.time_ns / SECOND_NS for event in events},
        nodes=dict(names_and_nodes([one for _, one in pods])),
    )


def equal(expected: Amounts | float, *, rel: float = 1e-9) -> Any:  # noqa: ANN401  # pytest's
    """Return an approximation, because a bill has three decimals, and costs have two."""
    return pytest.approx(expected, rel=rel, abs=0.005001)


def times(amounts: Amounts, factor: float) -> Amounts:
    return {name: factor * amount for name, amount in amounts.items()}


def namespace(labels: Mapping[str, str]) -> str:
    return labels["namespace"]


def pod(labels: Mapping[str, str]) -> str:
    return labels["pod"]


def owner(labels: Mapping[str, str]) -> str:
    return f"{labels['owner_kind']}/{labels['owner_name']}"


def team(labels: Mapping[str, str]) -> str:
    return labels.get("label_team", NO_TEAM)


def by_team(query: str) -> str:
    """Change the query by workload as the page describes."""
    asked = query.replace("namespace, owner_kind, owner_name", "owner_kind, owner_name")
    asked = asked.replace("owner_kind, owner_name", "label_team")
    return asked.replace('owner_name!=""', 'label_team!=""')


BY_WORKLOAD: Final = recipe("Used GPU-hours of a day by workload")
HOURS: Final = {
    "used, by namespace": (
        recipe("Used GPU-hours of a day by namespace"),
        namespace,
        ("namespace", "used_gpu_seconds"),
    ),
    "allocated, by namespace": (
        recipe("Allocated GPU-hours"),
        namespace,
        ("namespace", "allocated_gpu_seconds"),
    ),
    "unused, by pod": (recipe("Unused GPU-hours by pod"), pod, ("pod", "unused_cost")),
    "used, by workload": (BY_WORKLOAD, owner, ("owner", "used_gpu_seconds")),
    "used, by team": (by_team(BY_WORKLOAD), team, ("team", "used_gpu_seconds")),
    "allocated, by team": (
        by_team(BY_WORKLOAD).replace("busy", "allocated"),
        team,
        ("team", "allocated_gpu_seconds"),
    ),
}
"""Queries of GPU-hours, the labels of their results, and the bill's dimension and column."""


@pytest.mark.parametrize("case", HOURS)
def test_gpu_hours_in_prometheus_are_those_of_the_bill(run: Run, case: str) -> None:
    query, name_of, (by, field) = HOURS[case]

    expected = run.billed(by, field)
    assert len(expected) > 3
    assert times(run.query(query, name_of), 3600) == equal(expected)


def test_use_and_allocations_of_a_container_have_the_same_labels(run: Run) -> None:
    """On whole GPUs, shares and MIG instances: so they are divided without a list of labels."""
    used, allocated = (
        f'increase(gpuledger_gpu_{name}_seconds_total{{category="pod"}}[1d])'
        for name in ("busy", "allocated")
    )
    of_pods = run.billed("pod", "allocated_gpu_seconds")
    found = run.query(f"{used} / {allocated}", pod)

    assert found.keys() == of_pods.keys()
    for name, seconds in run.billed("pod", "used_gpu_seconds").items():
        assert found[name] == pytest.approx(seconds / of_pods[name], rel=0.001)


def test_the_energy_of_namespaces_is_that_of_the_bill(run: Run) -> None:
    """The bill rounds to a millionth of a kilowatt-hour."""
    found = run.query(recipe("Energy of a day by namespace"), namespace)

    assert found == pytest.approx(run.billed("namespace", "energy_kilowatt_hours"), abs=1e-6)


RATES: Final = {
    "busy, by workload": (recipe("Busy GPUs by workload"), owner, ("owner", "used_gpu_seconds")),
    "unused, by pod": (recipe("**Unused.**"), pod, ("pod", "unused_cost")),
    "busy, by team": (recipe("Join the info series", TEAMS), team, ("team", "used_gpu_seconds")),
}
"""Queries of present GPUs: over the rate's range they add up to the seconds of the bill."""


@pytest.mark.parametrize("case", RATES)
def test_the_present_use_of_pods_adds_up_to_the_bill(run: Run, case: str) -> None:
    """The info series, and so the results, are those of the pods that are still there."""
    query, name_of, (by, field) = RATES[case]

    found = times(run.query(query, name_of), RATE_SECONDS)
    of_all = run.billed(by, field)
    assert found
    for name, seconds in found.items():
        # The team research also has pods that have ended.
        if name != "team-research":
            assert seconds == equal(of_all[name]), name


def seconds_of(query: str) -> str:
    """Return the query of a gauge's sum over the ticks, of which each lasts a second."""
    return f"sum_over_time(({query})[{2 * SECONDS}s:1s])"


def test_the_allocated_gpus_of_pods_add_up_to_the_bill(run: Run) -> None:
    found = run.query(seconds_of(recipe("**Allocated.**")), lambda labels: labels["allocated_pod"])

    # The first and the last tick of a pod are not whole seconds.
    assert found == pytest.approx(run.billed("pod", "allocated_gpu_seconds"), abs=2)


@pytest.mark.parametrize(
    "target",
    [
        one
        for one in dashboard.targets()
        if (one.panel, one.ref_id) in {("GPU busy, by pod", "A"), ("Top pods, now", "A")}
    ],
    ids=lambda target: target.panel,
)
def test_the_dashboards_busy_gpus_add_up_to_the_bill(run: Run, target: dashboard.Target) -> None:
    """Of all pods, because a pod is without a name until its record arrives."""
    found = run.total(seconds_of(f"sum by (cluster) ({target.query})"))

    assert found == equal(sum(run.billed("pod", "used_gpu_seconds").values()), rel=0.02)


def autoscaling_block(after: str) -> Any:  # noqa: ANN401  # any YAML value
    """Return the first documented YAML block after a heading."""
    found = re.search(re.escape(after) + r".*?\n *```yaml\n(.*?)\n *```", AUTOSCALING, re.DOTALL)
    assert found, after
    return yaml.safe_load(textwrap.dedent(found[1]))


def workloads(run: Run) -> list[dict[str, str]]:
    """Return the descriptions of the pods at the end: with shares, a MIG instance, a whole GPU."""
    found = run.labels('gpuledger_pod_info{owner_name!=""}')
    assert {one["owner_name"] for one in found} >= {"detect", "render", "pretrain"}
    return found


def used_by(run: Run, pod_uid: str) -> float:
    return run.total(f'sum by (cluster) (gpuledger_pod_gpu_busy_ratio{{pod_uid="{pod_uid}"}})')


@pytest.mark.parametrize("heading", ["## Scale with KEDA", "## Scale to zero and back"])
def test_a_scaled_object_gets_the_use_of_the_pods_of_its_workload(run: Run, heading: str) -> None:
    queries = [one["metadata"]["query"] for one in autoscaling_block(heading)["spec"]["triggers"]]
    for one in workloads(run):
        query = queries[0].replace('"serving"', f'"{one["namespace"]}"')
        query = query.replace('"Deployment"', f'"{one["owner_kind"]}"')
        query = query.replace('"chat"', f'"{one["owner_name"]}"')
        for aggregation in ("sum", "count"):
            query = query.replace(f"{aggregation}(", f"{aggregation} by (cluster) (")
        expected = used_by(run, one["pod_uid"])

        assert expected > 0 or one["owner_kind"] == "Job"
        assert run.total(query) == pytest.approx(expected)
    assert [run.labels(query) for query in queries[1:]] == [[]] * len(queries[1:])


def test_the_adapters_rule_gives_each_pod_its_use(run: Run) -> None:
    (rule,) = autoscaling_block("## Scale with a HorizontalPodAutoscaler")["rules"]["custom"]
    series = rule["seriesQuery"].partition("{")[0]
    assert re.sub(rule["name"]["matches"], "", series) == ""
    assert len(run.labels(rule["seriesQuery"])) > 2
    for one in workloads(run):
        matchers = f'namespace="{one["namespace"]}",pod=~"{one["pod"]}"'
        query = rule["metricsQuery"].replace("<<.Series>>", series)
        query = query.replace("<<.LabelMatchers>>", matchers).replace(
            "<<.GroupBy>>", "cluster, pod"
        )

        assert run.total(query) == pytest.approx(used_by(run, one["pod_uid"]))
