"""Names in OTLP: a collector that writes to Prometheus comes to the remote-write sink's names."""

import re
from itertools import chain

import pytest

from gpuledger.ledger.families import FAMILIES, FamilyMetric
from gpuledger_sinks import otlp_names as naming

SENT = [
    *(family for family in FAMILIES if not family.is_description),
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


def test_no_two_metrics_have_one_name() -> None:
    names = [naming.instrument_of(metric).name for metric in METRICS]

    assert len(set(names)) == len(names)


def test_every_label_is_an_attribute_of_the_resource_or_of_the_point_and_not_of_both() -> None:
    labels = {label for family in FAMILIES for label in family.labels}
    resource, point = set(naming.RESOURCE_ATTRIBUTES), set(naming.POINT_ATTRIBUTES)

    assert resource | point == labels
    assert not resource & point


def test_a_metric_without_a_known_unit_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="gpuledger_gpu_count"):
        naming.instrument_of(FamilyMetric(name="gpuledger_gpu_count", help="GPUs."))
