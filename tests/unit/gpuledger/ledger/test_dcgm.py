"""dcgm-exporter's names of an event's readings say what the node's page says under them."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.ledger.dcgm import OF_DEVICES, OF_MEMORIES, DcgmSeries
from gpuledger.records import Account, Entry, GpuBooks, GpuEvent, GpuProfiling, GpuReading
from gpuledger_agent.exposition.dcgm_fields import find_field
from gpuledger_agent.exposition.device import ShownDevice
from tests.unit.sinks.builders import GPU, SECOND_NS, books, entry, event, holder, reading

FIELDS = [*OF_DEVICES, *OF_MEMORIES]
_BYTES = st.none() | st.integers(0, 2**40)
_RATIO = st.none() | st.integers(0, 10**6).map(lambda millionths: millionths / 10**6)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.metric.name)
@given(
    ratios=st.tuples(*[_RATIO] * 5),
    sizes=st.tuples(*[_BYTES] * 3),
    hertz=st.none() | st.integers(0, 10**10),
    milliwatts=st.none() | st.integers(0, 10**6),
)
def test_a_field_has_the_help_the_kind_and_the_value_that_the_nodes_page_gives_it(
    field: Any,  # noqa: ANN401  # a row of the table
    ratios: tuple[float | None, ...],
    sizes: tuple[int | None, ...],
    hertz: int | None,
    milliwatts: int | None,
) -> None:
    utilization, memory_utilization, sm, tensor, dram = ratios
    total, used, reserved = sizes
    of = reading(
        utilization_ratio=utilization,
        memory_utilization_ratio=memory_utilization,
        sm_active_ratio=sm,
        tensor_active_ratio=tensor,
        dram_active_ratio=dram,
        memory_total_bytes=total,
        memory_used_bytes=used,
        memory_reserved_bytes=reserved,
        sm_clock_hertz=hertz,
        memory_clock_hertz=hertz,
        power_milliwatts=milliwatts,
        energy_total_millijoules=milliwatts,
    )
    profiling = GpuProfiling(sm_active_ratio=sm, tensor_active_ratio=tensor, dram_active_ratio=dram)
    shown = find_field(field.metric.name)

    assert shown is not None
    metric = field.metric
    assert (metric.name, metric.help, metric.kind) == (shown.old, shown.help, shown.kind)
    assert field.read(of) == shown.read(ShownDevice(reading=of, profiling=profiling))


def told(one: GpuEvent, metric: str, host_label: str = "hostname") -> list[tuple[Any, float]]:
    """Return the labels that have a value, and the value, of each series of a metric."""
    found = []
    for group, values in DcgmSeries(host_label).values_of(one).items():
        labels = zip(group.family.labels, group.label_values, strict=True)
        for described, value in zip(group.family.metrics, values, strict=True):
            if described.name == metric and value is not None:
                found.append(({name: text for name, text in labels if text}, value))
    return found


def idle(holder: int | None, held_ns: int = SECOND_NS) -> Entry:
    return entry(Account.IDLE, holder=holder, held_ns=held_ns)


def held(*entries: Entry, holders: int = 1, of: GpuReading | None = None) -> GpuEvent:
    by = [holder(f"notebook-{number}") for number in range(holders)]
    return event(gpus=[books(of or reading(), *entries)], pods=[], held_by=by)


WHOLE = {
    "gpu": "0",
    "UUID": GPU,
    "device": "nvidia0",
    "modelName": "NVIDIA H100 80GB HBM3",
    "instance": "node-a",
    "hostname": "node-a",
}
POD = {"namespace": "research", "pod": "notebook-0", "container": "jupyter"}


def test_a_device_that_one_container_holds_has_its_pods_labels() -> None:
    assert told(held(idle(0)), "DCGM_FI_DEV_GPU_UTIL") == [(WHOLE | POD, 75.0)]
    assert told(held(idle(0)), "DCGM_FI_DEV_FB_USED") == [(WHOLE | POD, 20 * 1024)]


@pytest.mark.parametrize(
    "entries",
    [
        (idle(None),),
        (idle(0, SECOND_NS // 2), idle(1, SECOND_NS // 2)),
        (idle(0, SECOND_NS // 2), idle(None, SECOND_NS // 2)),
    ],
    ids=["nobody", "two", "half"],
)
def test_a_device_that_no_one_container_holds_has_none(entries: tuple[Entry, ...]) -> None:
    assert told(held(*entries, holders=2), "DCGM_FI_DEV_GPU_UTIL") == [(WHOLE, 75.0)]


def job_idle(job_id: str, held_ns: int = SECOND_NS) -> Entry:
    return entry(Account.IDLE, held_ns=held_ns, job_id=job_id)


@pytest.mark.parametrize(
    ("entries", "job"),
    [
        ((job_idle("7"),), "7"),
        ((job_idle("7", SECOND_NS // 2), job_idle("8", SECOND_NS // 2)), None),
        ((job_idle("7", SECOND_NS // 2), idle(0, SECOND_NS // 2)), None),
        ((idle(0),), None),
    ],
    ids=["one job", "two jobs", "a job and a pod", "a pod"],
)
def test_a_device_that_one_job_holds_has_the_jobs_label(
    entries: tuple[Entry, ...], job: str | None
) -> None:
    ((labels, _),) = told(held(*entries), "DCGM_FI_DEV_GPU_UTIL")
    assert labels.get("hpc_job") == job


def test_the_nodes_label_is_called_as_the_dashboards_call_it() -> None:
    ((labels, _),) = told(event(), "DCGM_FI_DEV_GPU_TEMP", host_label="Hostname")

    assert labels["Hostname"] == "node-a"
    assert "hostname" not in labels


def part(gpu_instance: int, compute_instance: int = 0) -> GpuBooks:
    of = reading(
        uuid=f"MIG-{gpu_instance}-{compute_instance}",
        parent_uuid=GPU,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        mig_profile="3g.40gb",
        power_milliwatts=None,
    )
    return books(of, idle(None))


def test_of_a_gpu_that_is_cut_no_sum_counts_twice() -> None:
    cut = event(gpus=[books(reading(mig_enabled=True)), part(1), part(2)])

    assert [
        (labels.get("GPU_I_ID"), labels["UUID"]) for labels, _ in told(cut, "DCGM_FI_DEV_GPU_UTIL")
    ] == [("1", GPU), ("2", GPU)]
    assert [labels.get("GPU_I_ID") for labels, _ in told(cut, "DCGM_FI_DEV_POWER_USAGE")] == [None]


def test_compute_instances_of_one_gpu_instance_are_told_apart_and_their_memory_once() -> None:
    cut = event(gpus=[part(1, 0), part(1, 1), part(2)])

    assert [labels.get("GPU_C_ID") for labels, _ in told(cut, "DCGM_FI_DEV_GPU_UTIL")] == [
        "0",
        "1",
        None,
    ]
    assert [labels["GPU_I_ID"] for labels, _ in told(cut, "DCGM_FI_DEV_FB_USED")] == ["1", "2"]


def test_every_label_is_one_that_prometheus_takes() -> None:
    for family in DcgmSeries().families:
        assert all(re.fullmatch(r"[a-zA-Z_]\w*", label) for label in family.labels)
        assert len(set(family.labels)) == len(family.labels)
