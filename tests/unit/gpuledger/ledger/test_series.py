"""Each series name has one meaning, and a sum over a name counts everything once."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from gpuledger.ledger.families import (
    FAMILIES,
    INCIDENT_FAMILIES,
    NAMESPACE_INFO,
    NODE_INFO,
    POD_DELETED,
    POD_INFO,
    Family,
)
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger.ledger.series import values_of
from gpuledger.records import NodeSample
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.device import SimulatedGpu
from gpuledger_simulator.scenario.load import load_scenario
from gpuledger_simulator.simulation import Simulation
from tests.docs_gen.metrics_page import METRICS_MODULES, collectors_of
from tests.ticks import event_of, play
from tests.unit.simulator.mig_builders import EPOCH_NS

ROOT = Path(__file__).parents[4]
SCENARIOS = ("quickstart", "sharing")
SECONDS = 20
"""No GPU of a scenario is repartitioned in this time."""
OF_DEVICES = {"gpu_uuid", "gpu_index", "model"}
OF_INSTANCES = {*OF_DEVICES, "parent_uuid", "gpu_instance", "compute_instance", "mig_profile"}
OF_ACCOUNTS = {"category", "pod", "namespace", "container", "allocated_pod"}
OF_METHODS = {"gpu_uuid", "quantity", "method"}
INFO = (POD_INFO, POD_DELETED, NAMESPACE_INFO, NODE_INFO)


def names_of(family: Family) -> set[str]:
    return {metric.name for metric in family.metrics}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.metrics[0].name)
def test_the_labels_of_a_family_are_those_of_nodes_devices_instances_or_categories(
    family: Family,
) -> None:
    """An entry's labels contain nothing that may change while it is booked: no index, no method."""
    labels = set(family.labels)

    if not labels & OF_ACCOUNTS:
        assert labels in (set[str](), OF_DEVICES, OF_INSTANCES, OF_METHODS) or family in INFO
    assert not (labels & OF_ACCOUNTS and labels & (OF_INSTANCES - {"gpu_uuid"}))
    is_described = {"owner_kind", "owner_name"} <= labels
    assert not labels & {"owner_kind", "owner_name"} or (is_described and family in INFO)


def test_no_name_occurs_in_two_families() -> None:
    names = Counter(
        chain.from_iterable(map(names_of, (*FAMILIES, *HEALTH_FAMILIES, *INCIDENT_FAMILIES)))
    )

    assert {name for name, count in names.items() if count > 1} == set()


def test_no_name_occurs_on_a_page_that_prometheus_scrapes() -> None:
    page = (ROOT / "docs" / "reference" / "agent-metrics.md").read_text()
    scraped = set(re.findall(r"^\| `(gpuledger_\w+)`", page, flags=re.MULTILINE))
    for module in METRICS_MODULES.values():
        described = (collector.describe() for collector in collectors_of(module))
        scraped |= {family.name for family in chain.from_iterable(described)}

    assert scraped
    assert (
        set(chain.from_iterable(map(names_of, (*FAMILIES, *HEALTH_FAMILIES, *INCIDENT_FAMILIES))))
        & scraped
        == set()
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A scenario's first seconds, booked, and the truth behind them."""

    gpus: list[SimulatedGpu]
    joules: float
    """The GPUs' total energy while the ticks ran."""
    seconds: float
    """The total length of a node's ticks."""
    sums: Mapping[str, float]
    """By name, the sum over its series, integrated over the ticks."""

    def mean(self, *names: str) -> float:
        return sum(self.sums[name] for name in names) / self.seconds


@cache
def run_of(scenario: str) -> Run:
    """Play each node of a scenario on its own clock, and sum what the sink would send."""
    read = load_scenario(ROOT / "scenarios" / f"{scenario}.yaml")
    gpus, sums, joules, seconds = list[SimulatedGpu](), defaultdict[str, float](float), 0.0, 0.0
    for name in (node.name for node in read.nodes):
        clock = ManualClock(start_ns=EPOCH_NS)
        node = Simulation(read, epoch_ns=EPOCH_NS, clock=clock).node(name)
        # The first tick begins before the scenario, so the truth does not cover it.
        samples = [tick.sample for tick in play(node, clock, [1.0] * SECONDS)][1:]
        start_ns = samples[0].time_ns - samples[0].interval_ns - EPOCH_NS
        end_ns = samples[-1].time_ns - EPOCH_NS
        gpus += node.gpus
        joules += sum(gpu.joules(start_ns, end_ns) for gpu in node.gpus)
        seconds = (end_ns - start_ns) / 1e9
        for sample in samples:
            for metric, integral in integrals_of(sample):
                sums[metric] += integral
    return Run(gpus=gpus, joules=joules, seconds=seconds, sums=sums)


def integrals_of(sample: NodeSample) -> Iterator[tuple[str, float]]:
    for group, values in values_of(event_of(sample)).items():
        for metric, value in zip(group.family.metrics, values, strict=True):
            yield metric.name, (value or 0.0) * sample.interval_ns / 1e9


def parts(quantity: str) -> tuple[str, str]:
    return f"gpuledger_pod_gpu_{quantity}", f"gpuledger_category_gpu_{quantity}"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_devices_memory_is_the_sum_of_its_parts_and_matches_the_truth(scenario: str) -> None:
    run = run_of(scenario)

    true_bytes = sum(gpu.facts.memory_bytes for gpu in run.gpus)
    assert run.mean("gpuledger_gpu_memory_total_bytes") == pytest.approx(true_bytes)
    assert run.mean(*parts("memory_bytes")) == pytest.approx(true_bytes)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_devices_power_is_the_sum_of_its_parts_and_matches_the_truth(scenario: str) -> None:
    run = run_of(scenario)

    true_watts = run.joules / run.seconds
    assert run.mean("gpuledger_gpu_power_watts") == pytest.approx(true_watts, rel=0.01)
    assert run.mean(*parts("power_watts")) == pytest.approx(true_watts, rel=0.01)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_busy_and_idle_time_sum_to_the_devices_that_report_it(scenario: str) -> None:
    """A partitioned GPU reports none; its instances do."""
    run = run_of(scenario)

    instances = [len(gpu.facts.cuts[0].instances) for gpu in run.gpus if gpu.facts.cuts]
    devices = sum(not gpu.facts.cuts for gpu in run.gpus) + sum(instances)
    assert run.mean(*parts("busy_ratio")) == pytest.approx(devices)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_allocated_time_sums_to_the_devices_and_by_device_fraction_to_the_physical_gpus(
    scenario: str,
) -> None:
    """A single instance is not a whole GPU, and the rest of the GPU is unallocated."""
    run = run_of(scenario)

    rows = [1 + len(gpu.facts.cuts[0].instances if gpu.facts.cuts else ()) for gpu in run.gpus]
    assert run.mean("gpuledger_allocation_gpu_ratio") == pytest.approx(sum(rows))
    assert run.mean("gpuledger_allocation_physical_gpu_ratio") == pytest.approx(len(run.gpus))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_memory_of_instances_is_within_that_of_their_gpus(scenario: str) -> None:
    """Compute instances of one GPU instance report the same memory, which is sent once."""
    run = run_of(scenario)

    cut_bytes = sum(gpu.facts.memory_bytes for gpu in run.gpus if gpu.facts.cuts)
    assert run.mean("gpuledger_mig_instance_memory_total_bytes") <= cut_bytes
    assert bool(cut_bytes) == bool(run.sums["gpuledger_mig_instance_memory_total_bytes"])
