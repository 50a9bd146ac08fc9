"""The catalogue has every reading of the records, and no slow call."""

import pynvml

from gpuledger.records import (
    GpuDetails,
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
)
from gpuledger.records.base import BaseRecord
from gpuledger_agent.core.raw import CallGroup
from gpuledger_agent.core.readings import READINGS
from gpuledger_agent.gpu.nvidia.catalogue import (
    CATALOGUE,
    EACH_LINK,
    FieldValue,
    FunctionCall,
    GpmMetric,
    MetricSpec,
)
from tests.tables import for_each

ALL: list[tuple[CallGroup, MetricSpec]] = [
    (group, reading) for group, readings in CATALOGUE.items() for reading in readings
]
NAMES = [reading.name for _, reading in ALL]
PARTS: dict[str, type[BaseRecord]] = {
    "profiling": GpuProfiling,
    "traffic": GpuTraffic,
    "throttling": GpuThrottling,
    "health": GpuHealth,
    "limits": GpuLimits,
}
# Identity, derived values, the parts themselves, and the values that are booked from them.
NOT_QUERIED = {
    "uuid", "index", "model", "parent_uuid", "gpu_instance", "compute_instance", "mig_profile",
    "mig_enabled", "energy_millijoules", "energy_method", "idle_draw_milliwatts", "resets", *PARTS,
    "sm_active_ratio", "tensor_active_ratio", "dram_active_ratio", "compute_slices",
    "memory_slices", "unresponsive", "memory_unified", "busy_method",
}  # fmt: skip


def test_the_catalogue_and_its_calls_have_the_same_readings_in_each_group() -> None:
    requested = {group: [one.name for one in readings] for group, readings in CATALOGUE.items()}
    assert requested == {group: list(specs) for group, specs in READINGS.items()}


@for_each("group, reading", ALL)
def test_a_reading_with_several_values_is_queried_as_such(
    group: CallGroup, reading: MetricSpec
) -> None:
    spec = READINGS[group][reading.name]
    for source in reading.sources:
        is_metric_by_link = isinstance(source, GpmMetric) and source.is_by_link
        is_field_by_link = isinstance(source, FieldValue) and source.link == EACH_LINK
        is_by_link = is_metric_by_link or is_field_by_link
        # A metric has one number per link; a field has one number, queried with the link's number.
        has_several = isinstance(source, GpmMetric | FieldValue) and source.count is not None
        is_list = has_several and not is_metric_by_link
        assert (spec.is_list, spec.is_by_link) == (is_list, is_by_link)


def test_every_field_of_a_reading_is_in_the_catalogue_once() -> None:
    own = [*GpuReading.__struct_fields__, *GpuDetails.__struct_fields__]
    parts = [
        f"{name}.{field}"
        for name, part in PARTS.items()
        for field in part.__struct_fields__
        if (name, field) != ("profiling", "interval_ns")
    ]
    assert sorted(NAMES) == sorted([*(name for name in own if name not in NOT_QUERIED), *parts])


@for_each("group, reading", ALL)
def test_every_query_exists_in_the_binding(group: CallGroup, reading: MetricSpec) -> None:
    for question in reading.sources:
        if isinstance(question, FunctionCall):
            assert callable(getattr(pynvml, question.name))
            assert question.fills is None or hasattr(pynvml, question.fills)
        elif isinstance(question, FieldValue):
            assert 0 < question.number < pynvml.NVML_FI_MAX
        else:
            assert 0 < question.number < pynvml.NVML_GPM_METRIC_MAX
        # The chip's per-link counters are read with the health.
        is_of_chip = reading.name.startswith("profiling.")
        is_rate_of_a_link = "_link_" in reading.name and reading.name.endswith("_per_second")
        assert isinstance(question, GpmMetric) == (is_of_chip or is_rate_of_a_link)
        assert not is_of_chip or group in (CallGroup.SENSORS, CallGroup.PROFILING)


def test_values_of_the_tick_itself_are_queried_in_each_tick() -> None:
    """Booked ratios must cover exactly the tick; one over five ticks would be wrong."""
    of_ticks = {
        reading.name.removeprefix("profiling.")
        for group, reading in ALL
        if group in (CallGroup.USAGE, CallGroup.SENSORS)
    }
    booked = set(GpuReading.__struct_fields__)
    assert booked - NOT_QUERIED <= of_ticks
    assert booked & set(GpuProfiling.__struct_fields__) <= of_ticks
    assert of_ticks - booked == {"graphics_engine_active_ratio"}, (
        "only used as an instance's utilization"
    )


@for_each("reading", [reading for _, reading in ALL])
def test_totals_are_named_as_such_and_ratios_and_flags_have_their_types(
    reading: MetricSpec,
) -> None:
    field = reading.name.rpartition(".")[2]
    assert reading.unit.is_total == ("_total" in field and "memory_total" not in field)
    if field.endswith("_bit_error_ratios"):
        assert reading.unit.decode
    elif field.endswith(("_ratio", "_ratios")):
        assert reading.unit.over == 100
        may_exceed_all = field == "fan_speed_ratio"
        assert reading.unit.high == 100 or reading.unit.cap == 1 or may_exceed_all
    else:
        assert reading.unit.over is None


def test_the_call_that_sleeps_is_not_used() -> None:
    requested = {
        one.name for _, reading in ALL for one in reading.sources if isinstance(one, FunctionCall)
    }
    assert "nvmlDeviceGetPcieThroughput" not in requested
