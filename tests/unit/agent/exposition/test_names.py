"""One name, one help text: on the page, and compared with the sinks' series of the same GPUs."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from prometheus_client.parser import text_string_to_metric_families

import gpuledger_agent.metrics
from gpuledger.ledger.families import FAMILIES, INCIDENT_FAMILIES
from gpuledger.ledger.health import HEALTH_FAMILIES
from gpuledger_agent.exposition.families import (
    INFO_FAMILIES as FACTS,
)
from gpuledger_agent.exposition.families import (
    LABELS,
    PROCESS_FAMILIES,
    InfoFamily,
    native_families,
)
from gpuledger_agent.settings import ExpositionSettings
from tests.docs_gen.metrics_page import METRICS_MODULES, collectors_of, label_names_of
from tests.unit.agent.exposition.builders import GIB, allocation, gpu, node, process, sample

INFO_FAMILIES: tuple[InfoFamily, ...] = (*FACTS, *PROCESS_FAMILIES)
PAGE = {family.name for family in native_families()} | {one.name for one in INFO_FAMILIES}
SENT = {
    metric.name
    for family in (*FAMILIES, *HEALTH_FAMILIES, *INCIDENT_FAMILIES)
    for metric in family.metrics
}


def test_the_page_of_a_node_and_the_series_of_the_sinks_share_no_name() -> None:
    assert not PAGE & SENT


def test_names_of_the_sinks_gpu_series_are_not_on_the_page() -> None:
    assert not [name for name in PAGE if name.startswith("gpuledger_gpu_")]


def test_a_gpu_has_the_same_labels_in_all_metrics() -> None:
    known = {"gpu_uuid", "gpu_index"}
    found = {label for _, labels in _all_labels() for label in labels if "gpu" in label.lower()}
    assert found - {"gpu_instance"} == known
    assert not [
        name for name, labels in _all_labels() if {"uuid", "UUID", "index", "device"} & {*labels}
    ]


def _all_labels() -> Iterator[tuple[str, tuple[str, ...]]]:
    for module in METRICS_MODULES.values():
        yield from _labels_of(module)
    for family in native_families():
        yield family.name, (*LABELS, *family.label_names)
    for info in INFO_FAMILIES:
        yield info.name, info.label_names
    for sent in (*FAMILIES, *HEALTH_FAMILIES, *INCIDENT_FAMILIES):
        for metric in sent.metrics:
            yield metric.name, sent.labels


def _labels_of(module: ModuleType) -> Iterator[tuple[str, tuple[str, ...]]]:
    for collector in collectors_of(module):
        yield str(collector), label_names_of(collector)


def test_the_agents_own_metrics_are_not_repeated_on_the_page() -> None:
    own = {
        family.name for one in collectors_of(gpuledger_agent.metrics) for family in one.describe()
    }
    assert not own & {name.removesuffix("_total") for name in PAGE}


@pytest.mark.parametrize("profile", ["lean", "full"])
def test_no_family_on_the_page_mixes_a_device_and_its_parts(profile: str) -> None:
    it = node(ExpositionSettings(profile=profile, process_series=True), one="ml/a/main")  # type: ignore[arg-type]  # one of the two
    it.show(
        sample(
            gpu(0, utilization_ratio=0.5, memory_used_bytes=2 * GIB, power_milliwatts=300_000),
            containers=["one"],
            processes=[process(0, 0)],
            allocations=[
                allocation(0, "ml/a/main", replica="0"),
                allocation(0, "ml/b/main", replica="1"),
            ],
        )
    )
    for family in text_string_to_metric_families(it.page().decode()):
        of_parts = ["pod" in one.labels or "pid" in one.labels for one in family.samples]
        assert len({*of_parts}) == 1, family.name


def test_a_lean_page_has_fewer_of_our_own_names_and_all_of_dcgms() -> None:
    pages = {}
    for profile in ("lean", "full"):
        it = node(ExpositionSettings(profile=profile))
        it.show(sample(gpu(0, utilization_ratio=0.5, sm_clock_hertz=10**9, power_milliwatts=1_000)))
        lines = it.page().decode().splitlines()
        pages[profile] = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    more = pages["full"] - pages["lean"]
    assert pages["lean"] < pages["full"]
    assert "gpuledger_node_gpu_sm_clock_hertz" in more
    assert not [name for name in more if name.startswith("DCGM_")]
    assert {"gpuledger_node_gpu_up", "gpuledger_node_gpu_power_watts"} <= pages["lean"]
