"""Readings under the names of OpenTelemetry's hardware conventions, once each."""

from typing import Any

import pytest

from gpuledger.ledger.hardware import HARDWARE_ATTRIBUTES, HARDWARE_FAMILIES, HardwareSeries
from gpuledger.records import GpuBooks, GpuEvent
from tests.unit.sinks.builders import GPU, books, event, reading

READ = {"memory_total_bytes": 80 * 2**30, "memory_used_bytes": 20 * 2**30}
OF_A_GPU = {
    "hw_id": GPU,
    "hw_type": "gpu",
    "hw_name": "nvidia0",
    "hw_vendor": "NVIDIA",
    "hw_model": "NVIDIA H100 80GB HBM3",
}
OF_A_SENSOR = {"hw_id": GPU, "hw_name": "nvidia0", "hw_sensor_location": "GPU_DIE"}


def told(one: GpuEvent) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the labels that have a value, and the value, of each series, by metric."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for group, values in HardwareSeries().values_of(one).items():
        pairs = zip(group.family.labels, group.label_values, strict=True)
        labels = {name: text for name, text in pairs if text}
        for metric, value in zip(group.family.metrics, values, strict=True):
            if value is not None:
                found.setdefault(metric.name, []).append((labels, value))
    return found


@pytest.mark.parametrize(
    ("metric", "labels", "value"),
    [
        ("hw_gpu_utilization_ratio", OF_A_GPU | {"hw_gpu_task": "general"}, 0.75),
        ("hw_gpu_memory_limit_bytes", OF_A_GPU, 80 * 2**30),
        ("hw_gpu_memory_usage_bytes", OF_A_GPU, 20 * 2**30),
        ("hw_gpu_memory_utilization_ratio", OF_A_GPU, 0.25),
        ("hw_energy_joules_total", OF_A_GPU, 5.5),
        ("hw_power_watts", OF_A_GPU, 350.5),
        ("hw_temperature_celsius", OF_A_SENSOR, 61),
    ],
)
def test_a_gpu_is_told_of_in_base_units_with_what_the_conventions_ask_for(
    metric: str, labels: dict[str, str], value: float
) -> None:
    of = reading(energy_total_millijoules=5_500, **READ)

    assert told(event(gpus=[books(of)]))[metric] == [(labels, value)]


def test_what_was_not_read_is_absent() -> None:
    nothing: dict[str, Any] = {
        "utilization_ratio": None,
        "memory_total_bytes": None,
        "memory_used_bytes": None,
        "power_milliwatts": None,
        "temperature_celsius": None,
    }

    assert told(event(gpus=[books(reading(**nothing))])) == {}


def part(gpu_instance: int, compute_instance: int = 0) -> GpuBooks:
    of = reading(
        uuid=f"MIG-{gpu_instance}-{compute_instance}",
        parent_uuid=GPU,
        gpu_instance=gpu_instance,
        compute_instance=compute_instance,
        power_milliwatts=None,
        temperature_celsius=None,
    )
    return books(of)


def test_of_a_gpu_that_is_cut_no_sum_counts_twice() -> None:
    found = told(event(gpus=[books(reading(mig_enabled=True)), part(1, 0), part(1, 1), part(2)]))

    assert {metric: [labels["hw_id"] for labels, _ in of] for metric, of in found.items()} == {
        "hw_gpu_utilization_ratio": ["MIG-1-0", "MIG-1-1", "MIG-2-0"],
        "hw_gpu_memory_limit_bytes": ["MIG-1-0", "MIG-2-0"],
        "hw_gpu_memory_usage_bytes": ["MIG-1-0", "MIG-2-0"],
        "hw_gpu_memory_utilization_ratio": ["MIG-1-0", "MIG-2-0"],
        "hw_power_watts": [GPU],
        "hw_temperature_celsius": [GPU],
    }
    (labels, _), *_ = found["hw_gpu_utilization_ratio"]
    assert (labels["hw_parent"], labels["hw_name"]) == (GPU, "nvidia0/gi1/ci0")


def test_every_label_is_an_attribute_of_the_conventions() -> None:
    labels = {label for family in HARDWARE_FAMILIES for label in family.labels}

    assert labels == HARDWARE_ATTRIBUTES.keys()
    assert HARDWARE_ATTRIBUTES["hw_gpu_task"] == "hw.gpu.task"
