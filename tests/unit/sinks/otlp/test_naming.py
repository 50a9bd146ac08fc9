"""Names in OTLP: a collector that writes to Prometheus comes to the remote-write sink's names."""

import re
from itertools import chain

import pytest

from gpuledger.ledger.families import FAMILIES, FamilyMetric
from gpuledger.ledger.hardware import BOARDS, HARDWARE_FAMILIES, MEMORIES, SENSORS, TASKS
from gpuledger_sinks import otlp_names as naming

SENT = [
    *(family for family in FAMILIES if not family.is_description),
    *(TASKS, MEMORIES, BOARDS, SENSORS),
]
METRICS = list(chain.from_iterable(family.metrics for family in SENT))
# OpenTelemetry's rules for Prometheus and OpenMetrics: the unit's name goes behind the metric's.
PROMETHEUS_UNITS = {
    "1": "ratio",
    "By": "bytes",
    "W": "watts",
    "J": "joules",
    "Cel": "celsius",
    "Hz": "hertz",
    "s": "seconds",
}


def in_prometheus(instrument: naming.Instrument) -> str:
    name = re.sub(r"[^a-zA-Z0-9_:]", "_", instrument.name)
    if instrument.unit:
        name = f"{name}_{PROMETHEUS_UNITS[instrument.unit]}"
    return f"{name}_total" if instrument.is_counter else name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_has_in_prometheus_the_name_that_remote_write_sends(metric: FamilyMetric) -> None:
    instrument = naming.instrument_of(metric)

    assert in_prometheus(instrument) == metric.name
    assert "_" not in instrument.name


@pytest.mark.parametrize(
    ("metric", "name", "unit", "kind"),
    [
        ("hw_gpu_utilization_ratio", "hw.gpu.utilization", "1", "gauge"),
        ("hw_gpu_memory_limit_bytes", "hw.gpu.memory.limit", "By", "updowncounter"),
        ("hw_gpu_memory_usage_bytes", "hw.gpu.memory.usage", "By", "updowncounter"),
        ("hw_gpu_memory_utilization_ratio", "hw.gpu.memory.utilization", "1", "gauge"),
        ("hw_energy_joules_total", "hw.energy", "J", "counter"),
        ("hw_power_watts", "hw.power", "W", "gauge"),
        ("hw_temperature_celsius", "hw.temperature", "Cel", "gauge"),
    ],
)
def test_a_metric_of_the_hardware_conventions_is_as_they_have_it(
    metric: str, name: str, unit: str, kind: str
) -> None:
    (described,) = [one for one in METRICS if one.name == metric]

    made = naming.instrument_of(described)

    assert (made.name, made.unit) == (name, unit)
    assert (made.is_sum, made.is_counter) == (kind != "gauge", kind == "counter")


def test_no_two_metrics_have_one_name() -> None:
    names = [naming.instrument_of(metric).name for metric in METRICS]

    assert len(set(names)) == len(names)


def test_every_label_is_an_attribute_of_the_resource_or_of_the_point_and_not_of_both() -> None:
    labels = {label for family in FAMILIES for label in family.labels}
    resource, point = set(naming.RESOURCE_ATTRIBUTES), set(naming.POINT_ATTRIBUTES)

    assert resource | point == labels
    assert not resource & point
    of_the_conventions = {label for family in HARDWARE_FAMILIES for label in family.labels}
    assert naming.NAMES_ON_POINTS.keys() == point | of_the_conventions


def test_a_metric_without_a_known_unit_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="gpuledger_gpu_count"):
        naming.instrument_of(FamilyMetric(name="gpuledger_gpu_count", help="GPUs."))
