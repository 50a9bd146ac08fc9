"""From the driver's values to a reading's parts: base units, only plausible values."""
# ruff: noqa: ANN401  # the driver's values are of any type

import math
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import GpuProfiling
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.core.raw import RawGpuSample
from tests.ticks import tick_gpu
from tests.unit.record_fields import present_in

SECOND_NS = 1_000_000_000
BLANK = RawGpuSample(uuid="GPU-0", index=0)


def read(gpu: GpuSampler | None = None, second: int = 1, /, **given: Any) -> GpuTick:
    return tick_gpu(gpu or GpuSampler(), replace(BLANK, **given), now_ns=second * SECOND_NS)


def value_of(tick: GpuTick, name: str) -> Any:
    part, _, field = name.rpartition(".")
    if part:
        return getattr(getattr(tick.details, part), field, None)
    return getattr(tick.reading if hasattr(tick.reading, field) else tick.details, field)


@pytest.mark.parametrize(
    ("group", "name", "value", "ours"),
    [
        ("readings", "encoder_utilization_ratio", 25, 0.25),
        ("readings", "memory_temperature_celsius", 61, 61),
        ("readings", "jpeg_utilization_ratio", 7, 0.07),
        ("readings", "optical_flow_utilization_ratio", 0, 0.0),
        ("readings", "temperature_margin_celsius", -3, -3),
        ("sensors", "sm_clock_hertz", 1980, 1_980_000_000),
        ("readings", "power_instant_milliwatts", 412_345, 412_345),
        ("readings", "performance_state", 15, 15),
        ("readings", "throttling.reasons", 0x1FF, 0x1FF),
        ("readings", "throttling.power_ns_total", 1_500_000_000, 1_500_000_000),
        ("readings", "traffic.pcie_sent_bytes_total", 1000, 1000),
        ("readings", "traffic.nvlink_sent_bytes_total", 3, 3072),
        ("profiling", "profiling.sm_occupancy_ratio", 12.5, 0.125),
        ("activity", "profiling.sm_active_ratio", 100.000001, 1.0),
        ("profiling", "profiling.pcie_sent_bytes_per_second", 1.5, 1_572_864),
        ("profiling", "profiling.nvdec_active_ratios", [50.0, 0.0], [0.5, 0.0]),
        (
            "health",
            "health.nvlink_link_sent_bytes_per_second",
            {0: 1.5, 17: 0.0},
            {"0": 1_572_864, "17": 0},
        ),
        ("health", "health.recovery_action", 4, "drain_and_reset"),
        ("health", "health.remapped_rows_pending", 1, True),
        ("health", "health.remapped_rows_failed", 0, False),
        ("health", "health.ecc_corrected_volatile_total", 7, 7),
        ("health", "health.fan_speed_ratio", 30, 0.3),
        ("health", "health.fan_speed_ratio", 112, 1.12),
        ("health", "limits.power_limit_min_milliwatts", 200_000, 200_000),
        ("health", "limits.temperature_slowdown_celsius", 89, 89),
        ("health", "limits.temperature_margin_shutdown_celsius", -8, -8),
        ("health", "limits.sm_clock_max_hertz", 1980, 1_980_000_000),
    ],
)
def test_a_value_is_converted_to_base_units(group: str, name: str, value: Any, ours: Any) -> None:
    tick = read(None, **{group: {name: value}})
    assert value_of(tick, name) == ours
    assert type(value_of(tick, name)) is type(ours)
    assert not tick.dropped_readings


@pytest.mark.parametrize(
    ("group", "name", "value", "reason"),
    [
        ("readings", "encoder_utilization_ratio", 101, "out_of_range"),
        ("readings", "performance_state", 32, "out_of_range"),
        ("readings", "memory_temperature_celsius", 2**32 - 1, "out_of_range"),
        ("readings", "temperature_margin_celsius", 2**32 - 3, "out_of_range"),
        ("readings", "power_instant_milliwatts", -1, "out_of_range"),
        ("readings", "throttling.power_ns_total", 2**64 - 1, "out_of_range"),
        ("readings", "traffic.nvlink_sent_bytes_total", 2**64 - 1, "out_of_range"),
        ("activity", "profiling.sm_active_ratio", 100.6, "out_of_range"),
        ("activity", "profiling.sm_active_ratio", math.inf, "not_a_number"),
        ("activity", "profiling.dram_active_ratio", math.nan, "not_a_number"),
        ("profiling", "profiling.nvlink_sent_bytes_per_second", 1e300, "out_of_range"),
        ("profiling", "profiling.nvdec_active_ratios", [101.0, 0.0], "out_of_range"),
        ("health", "health.recovery_action", 99, "unknown"),
        ("health", "health.sram_threshold_exceeded", 2, "unknown"),
        ("health", "health.fabric_state", "completed", "not_a_number"),
        ("health", "health.ecc_uncorrected_volatile_total", 2**32 - 1, "out_of_range"),
        ("health", "limits.power_limit_max_milliwatts", 2**32 - 1, "out_of_range"),
    ],
)
def test_an_implausible_value_is_absent_and_counted_by_reading_and_reason(
    group: str, name: str, value: Any, reason: str
) -> None:
    tick = read(None, **{group: {name: value}})
    assert value_of(tick, name) is None
    assert dict(tick.dropped_readings) == {(name, reason): 1}


def test_a_part_without_any_value_is_absent() -> None:
    details = read(readings={"throttling.reasons": 0}).details
    assert details.throttling
    assert present_in(details.throttling) == {"reasons": 0}
    parts = (details.profiling, details.traffic, details.health, details.limits)
    assert parts == (None, None, None, None)


def test_a_list_ends_before_the_first_engine_with_an_implausible_value() -> None:
    tick = read(profiling={"profiling.nvdec_active_ratios": [10.0, 101.0, 20.0]})
    assert value_of(tick, "profiling.nvdec_active_ratios") == [0.1]
    assert tick.dropped_readings.total() == 1


def test_profiling_over_more_than_this_tick_is_left_out() -> None:
    given = {"profiling.sm_active_ratio": 50.0}
    assert read(activity=given, activity_ns=int(1.4 * SECOND_NS)).details.profiling
    assert not read(activity=given, activity_ns=2 * SECOND_NS).details.profiling


def test_profiling_that_is_read_rarely_has_the_time_of_its_mean() -> None:
    """The tick's own values have another time, so that the two cannot be confused."""
    gpu = GpuSampler()
    tick = read(
        gpu,
        1,
        activity={"profiling.sm_active_ratio": 50.0},
        activity_ns=SECOND_NS,
        profiling={"profiling.fp16_active_ratio": 1.0},
        profiling_ns=5 * SECOND_NS,
    )
    assert tick.details.profiling == GpuProfiling(
        interval_ns=5 * SECOND_NS, sm_active_ratio=0.5, fp16_active_ratio=0.01
    )
    assert tick.reading.sm_active_ratio == 0.5
    alone = read(gpu, 2, activity={"profiling.sm_active_ratio": 50.0}, activity_ns=SECOND_NS)
    assert alone.details.profiling == GpuProfiling(sm_active_ratio=0.5)


def test_only_booked_profiling_values_are_in_both_records() -> None:
    given = {"sm_active_ratio": 50.0, "tensor_active_ratio": 40.0}
    tick = read(
        activity={f"profiling.{name}": value for name, value in given.items()},
        profiling={"profiling.fp16_active_ratio": 1.0},
        sensors={"sm_clock_hertz": 1},
        readings={"performance_state": 0},
    )
    booked = {"sm_active_ratio": 0.5, "tensor_active_ratio": 0.4}
    own = {"uuid": "GPU-0", "index": 0, "sm_clock_hertz": 1_000_000}
    assert present_in(tick.reading) == own | booked
    assert present_in(tick.details).keys() == {"uuid", "performance_state", "profiling"}
    assert tick.details.profiling == GpuProfiling(
        sm_active_ratio=0.5, tensor_active_ratio=0.4, fp16_active_ratio=0.01
    )


def test_profiling_over_more_than_this_tick_is_not_booked() -> None:
    given = {"profiling.sm_active_ratio": 50.0}
    assert read(activity=given, activity_ns=2 * SECOND_NS).reading.sm_active_ratio is None


def test_a_gpu_that_has_not_joined_its_fabric_reports_no_fabric_health() -> None:
    message = {"health.fabric_status": 0, "health.fabric_health_mask": 2}
    joined = read(health={"health.fabric_state": 3, **message}).details.health
    joining = read(health={"health.fabric_state": 2, **message}).details.health
    assert joined
    assert present_in(joined) == {
        "fabric_state": "completed", "fabric_status": 0, "fabric_health_mask": 2
    }  # fmt: skip
    assert joining
    assert present_in(joining) == {"fabric_state": "in_progress"}


@pytest.mark.parametrize(("pair", "is_so"), [(0, None), (1, True), (2, False), (3, None)])
def test_a_pair_of_bits_means_true_false_or_unknown(pair: int, *, is_so: bool | None) -> None:
    names = ("bandwidth_degraded", "route_recovery", "route_unhealthy", "access_timeout")
    for position, name in enumerate(names):
        # All bits of the other conditions, and the higher bits of newer drivers.
        mask = 0xFFFF_FFFF & ~(3 << 2 * position) | pair << 2 * position
        tick = read(health={"health.fabric_state": 3, f"health.fabric_{name}": mask})
        assert value_of(tick, f"health.fabric_{name}") is is_so


def test_bit_error_ratios_are_unpacked_and_never_exceed_one() -> None:
    name = "health.nvlink_link_symbol_bit_error_ratios"
    packed = {0: 0x30C, 1: 0xFFF, 2: 0x100, 3: 0xF00, 4: 2**32 - 1}
    tick = read(health={name: packed})
    assert value_of(tick, name) == {"0": 3e-12, "1": 15e-255, "2": 1.0}
    assert dict(tick.dropped_readings) == {(name, "out_of_range"): 1}


def test_a_list_per_link_ends_before_the_first_implausible_value() -> None:
    name = "health.nvlink_link_fec_history_totals"
    tick = read(health={name: {0: [5, 2**64 - 1, 1], 3: [2**64 - 1]}})
    assert value_of(tick, name) == {"0": [5]}


def test_a_counter_that_fell_is_named_even_after_ticks_without_it() -> None:
    name = "health.ecc_corrected_volatile_total"
    gpu = GpuSampler()
    first = read(gpu, 1, health={name: 9}, energy_millijoules=5000)
    between = read(gpu, 2, energy_millijoules=6000)
    last = read(gpu, 3, health={name: 2}, energy_millijoules=100)
    assert (first.details.resets, between.details.resets) == (None, None)
    assert last.details.resets == ["energy_total_millijoules", "ecc_corrected_volatile_total"]


SENT = "health.nvlink_link_sent_bytes_totals"


def test_the_bytes_of_each_link_are_keyed_by_its_number() -> None:
    tick = read(health={SENT: {0: 0, 3: 5, 17: 2**31}})
    assert value_of(tick, SENT) == {"0": 0, "3": 5 << 10, "17": 2**41}
    assert not tick.dropped_readings


def test_only_the_link_with_implausible_bytes_is_left_out() -> None:
    tick = read(health={SENT: {0: 2**64 - 1, 1: 7, 2: math.nan}})
    assert value_of(tick, SENT) == {"1": 7 << 10}
    assert dict(tick.dropped_readings) == {(SENT, "out_of_range"): 1, (SENT, "not_a_number"): 1}
    assert value_of(read(health={SENT: {0: -1}}), SENT) is None


def test_a_counter_of_a_link_that_fell_is_named_with_its_link() -> None:
    gpu = GpuSampler()
    read(gpu, 1, health={SENT: {0: 10, 3: 10, 4: 10}})
    last = read(gpu, 2, health={SENT: {0: 11, 3: 2, 4: 10}})
    assert value_of(last, SENT) == {"0": 11 << 10, "3": 2 << 10, "4": 10 << 10}
    assert last.details.resets == ["nvlink_link_sent_bytes_totals.3"]


FULL_SPEED = {
    ("health", SENT): 200 << 20,
    ("readings", "traffic.pcie_sent_bytes_total"): 200 << 30,
    ("readings", "traffic.nvlink_sent_bytes_total"): 3 << 30,
    ("readings", "throttling.power_ns_total"): 10**9,
}
"""The most by which bounded counters may rise in a second, in the driver's unit."""


def totals_at(seconds: int) -> dict[str, Any]:
    """Return all bounded counters after this many seconds at full speed."""
    given: dict[str, dict[str, Any]] = {"health": {}, "readings": {}}
    for (group, name), most in FULL_SPEED.items():
        given[group][name] = {0: 5 + most * seconds} if name == SENT else 5 + most * seconds
    return given | {"energy_millijoules": 5 + 1_000_000 * seconds}


@pytest.mark.parametrize("unresponsive", [0, 1, 9, 100])
@pytest.mark.parametrize("answers", [True, False])
def test_a_fast_counter_is_accepted_however_long_it_was_not_read(
    unresponsive: int,
    answers: bool,  # noqa: FBT001  # a parameter of the test
) -> None:
    """Whether the GPU did not answer, or the driver only left out the counter."""
    gpu = GpuSampler()
    read(gpu, 0, **totals_at(0))
    for second in range(1, unresponsive + 1):
        if answers:
            read(gpu, second)
        else:
            gpu.forget()
    gpu = GpuSampler()
    tick = read(gpu, unresponsive + 1, **totals_at(unresponsive + 1))
    assert not tick.dropped_readings
    assert tick.details.resets is None
    assert all(value_of(tick, name) for _, name in FULL_SPEED)
    assert tick.reading.energy_total_millijoules


def test_a_link_that_leapt_is_left_out_and_not_reset() -> None:
    gpu = GpuSampler()
    read(gpu, 1, health={SENT: {0: 5, 1: 5}})
    leapt = read(gpu, 2, health={SENT: {0: 2**50, 1: 6}})
    back = read(gpu, 3, health={SENT: {0: 7, 1: 7}})
    assert value_of(leapt, SENT) == {"1": 6 << 10}
    assert dict(leapt.dropped_readings) == {(SENT, "leap"): 1}
    assert value_of(back, SENT) == {"0": 7 << 10, "1": 7 << 10}
    assert back.details.resets is None


def test_counters_are_remembered_over_a_tick_in_which_the_gpu_did_not_answer() -> None:
    gpu = GpuSampler()
    read(gpu, 1, energy_millijoules=5000)
    gpu.forget()
    after = read(gpu, 3, energy_millijoules=100)
    assert after.details.resets == ["energy_total_millijoules"]
    assert after.reading.energy_millijoules is None


def test_a_counter_that_leapt_is_left_out_counted_and_not_reset() -> None:
    name = "throttling.power_ns_total"
    gpu = GpuSampler()
    read(gpu, 1, readings={name: 0})
    leapt = read(gpu, 2, readings={name: 10**17})
    back = read(gpu, 3, readings={name: 10**9})
    assert value_of(leapt, name) is None
    assert dict(leapt.dropped_readings) == {(name, "leap"): 1}
    assert value_of(back, name) == 10**9
    assert back.details.resets is None
