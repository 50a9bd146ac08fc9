"""The health of GPUs as series: the latest readings of each GPU, at a regular interval."""

import csv
from typing import Any

import pytest

from gpuledger.ledger.families import FAMILIES
from gpuledger.ledger.health import (
    HEALTH_FAMILIES,
    KEPT_NS,
    MAX_AGE_NS,
    READINGS,
    NodeHealth,
    health_values,
)
from gpuledger.ledger.interval_values import maxima_of
from gpuledger.records import (
    GpuDetails,
    GpuHealth,
    GpuLimits,
    GpuThrottling,
    GpuTraffic,
    NodeReadings,
)
from gpuledger.records.bounds import MAX_GPUS
from gpuledger_agent.exposition.families import FILE, native_families
from tests.errors import has_words
from tests.unit.sinks.builders import GPU, SECOND_NS, START_NS

EVERY_NS = 10 * SECOND_NS
ECC = "gpuledger_gpu_ecc_errors_total"
REASON = "gpuledger_gpu_throttle_reason"
LINK = "gpuledger_gpu_link_bytes_total"
SENT = (LINK, GPU, "pcie", "sent")


def details(uuid: str = GPU, **message: Any) -> GpuDetails:  # noqa: ANN401  # as GpuDetails takes them
    return GpuDetails(uuid=uuid, **message)


def healthy(errors: int = 0, uuid: str = GPU) -> GpuDetails:
    return details(uuid, health=GpuHealth(ecc_uncorrected_volatile_total=errors))


def throttled(reasons: int) -> GpuDetails:
    return details(throttling=GpuThrottling(reasons=reasons))


def readings(second: float, *gpus: GpuDetails) -> NodeReadings:
    return NodeReadings(
        cluster="default",
        node="node-a",
        boot_id="boot-1",
        seq=round(1000 * second),
        time_ns=START_NS + round(second * SECOND_NS),
        interval_ns=SECOND_NS,
        gpus=list(gpus),
    )


class Reports:
    """The values reported for a node as its readings arrive."""

    def __init__(self) -> None:
        self.known = NodeHealth()

    def at(self, second: float, *gpus: GpuDetails) -> dict[tuple[str, ...], float | None] | None:
        """Return the values by metric and the labels after the name; `None` if none are due."""
        values = health_values(readings(second, *gpus), self.known, every_ns=EVERY_NS)
        if values is None:
            return None
        return {
            (group.family.metrics[0].name, *group.label_values): value
            for group, (value,) in values.items()
        }


def test_the_table_has_the_readings_of_the_nodes_page_under_the_ledgers_names() -> None:
    """A reading has the same help, type and labels wherever it is shown."""
    page = {family.name: family for family in native_families()}
    for family in HEALTH_FAMILIES[:-2]:
        (metric,) = family.metrics
        same = page[on_the_page(metric.name)]
        assert (metric.help, metric.kind) == (same.help, same.kind)
        assert family.labels[1:] == same.label_names
    with FILE.open(newline="") as lines:
        rows = [row for row in csv.reader(lines) if not row[0].startswith("#")]
    shown = {
        (name, tuple(pair.partition("=")[2] for pair in further.split(",") if pair)): path
        for name, _, _, path, further, *_ in rows
    }
    mine = {(on_the_page(name), labels): path for (name, labels), path in READINGS.items()}
    assert mine == {key: path for key, path in shown.items() if key in mine}


def on_the_page(name: str) -> str:
    return name.replace("gpuledger_gpu_", "gpuledger_node_gpu_")


def test_all_gpus_are_reported_at_once_although_they_are_read_at_different_times() -> None:
    reported = Reports()

    assert reported.at(0, healthy(1)) is None
    assert reported.at(4, healthy(2, "GPU-b")) is None
    assert reported.at(10, healthy(3, "GPU-c")) == {
        (ECC, uuid, "uncorrected", "volatile"): number
        for uuid, number in ((GPU, 1), ("GPU-b", 2), ("GPU-c", 3))
    }
    assert reported.at(11, healthy(4)) is None


def test_a_throttle_reason_that_came_and_went_between_two_samples_is_reported() -> None:
    reported = Reports()
    for second, reasons in enumerate((0, 0x40, 0, 0, 0, 0, 0, 0, 0, 0)):
        assert reported.at(second, throttled(reasons)) is None
    values = reported.at(10, throttled(0x4))

    assert values is not None
    assert {key[-1] for key, value in values.items() if value} == {"hw_thermal", "power_cap"}
    assert {key[-1] for key, value in values.items() if value == 0.0} >= {"gpu_idle", "sync_boost"}
    for second in range(11, 20):
        reported.at(second, throttled(0))
    values = reported.at(20, throttled(0))
    assert values is not None
    assert set(values.values()) == {0.0}


@pytest.mark.parametrize("pace", [5, 12, 30])
def test_a_reading_that_is_rarer_than_its_reports_is_reported_without_a_gap(pace: int) -> None:
    reported = Reports()
    for second in range(121):
        requested = throttled(0x40) if second % pace == 0 else None
        traffic = GpuTraffic(pcie_sent_bytes_total=second) if requested else None
        given = details(throttling=requested and requested.throttling, traffic=traffic)
        values = reported.at(second, given)
        if values is not None:
            reason = ("gpuledger_gpu_throttle_reason", GPU, "hw_thermal")
            assert values[reason] == 1.0
            sent = values[*SENT]
            assert sent == second - second % pace, "only the last reading"


def test_readings_of_single_links_are_combined() -> None:
    reported = Reports()
    health = GpuHealth(
        nvlink_link_symbol_errors_totals={"0": 2, "5": 40},
        nvlink_link_symbol_bit_error_ratios={"0": 1e-15, "5": 3e-12},
    )
    reported.at(0, details(health=health))

    assert reported.at(10) == {
        ("gpuledger_gpu_nvlink_errors_total", GPU, "symbol"): 42,
        ("gpuledger_gpu_nvlink_bit_error_ratio", GPU, "symbol"): 3e-12,
    }


def test_unknown_throttle_reasons_are_reported_as_one() -> None:
    reported = Reports()
    reported.at(0, throttled(0x200 | 0x2000))
    values = reported.at(10, throttled(0))
    assert values is not None
    assert {key[-1] for key, value in values.items() if value} == {"other"}


def test_margins_and_maximum_clocks_are_reported_as_long_as_they_are_read() -> None:
    reported = Reports()
    limits = GpuLimits(temperature_margin_slowdown_celsius=-2, sm_clock_max_hertz=1_980_000_000)
    reported.at(0, details(limits=limits))
    values = reported.at(
        10, details(temperature_margin_celsius=-1, jpeg_utilization_ratio=0.5, traffic=GpuTraffic())
    )
    assert values == {
        ("gpuledger_gpu_temperature_margin_limit_celsius", GPU, "slowdown"): -2,
        ("gpuledger_gpu_sm_clock_limit_hertz", GPU): 1_980_000_000,
        ("gpuledger_gpu_temperature_margin_celsius", GPU): -1,
        ("gpuledger_gpu_jpeg_utilization_ratio", GPU): 0.5,
    }
    # Some readings are rarer than their reports; those that stop are reported for one more minute.
    assert reported.at(20, details(traffic=GpuTraffic())) == values
    for second in range(30, 90, 10):
        values = reported.at(second, details(traffic=GpuTraffic()))
    assert values is not None
    assert {name for name, *_ in values} == {
        "gpuledger_gpu_temperature_margin_limit_celsius", "gpuledger_gpu_sm_clock_limit_hertz"
    }  # fmt: skip


def test_a_missing_reading_has_no_series() -> None:
    reported = Reports()
    reported.at(0, details(health=GpuHealth(remapped_rows_pending=True)))

    assert reported.at(10) == {("gpuledger_gpu_remapped_rows_pending", GPU): 1.0}


def test_the_recovery_action_of_the_driver_is_reported_by_name() -> None:
    reported = Reports()
    reported.at(0, details(health=GpuHealth(recovery_action="drain_and_reset")))

    assert reported.at(10) == {("gpuledger_gpu_recovery_action_info", GPU, "drain_and_reset"): 1.0}


def test_times_are_reported_in_seconds() -> None:
    reported = Reports()
    reported.at(0)

    assert reported.at(10, details(throttling=GpuThrottling(power_ns_total=2_500_000_000))) == {
        ("gpuledger_gpu_throttled_seconds_total", GPU, "power"): 2.5
    }


def test_a_gpu_without_readings_is_no_longer_reported() -> None:
    reported, lost = Reports(), KEPT_NS // SECOND_NS + 1
    reported.at(0, healthy(), healthy(uuid="GPU-b"))
    reported.at(10, healthy(), healthy(uuid="GPU-b"))

    values = reported.at(10 + lost, healthy())

    assert values is not None
    assert {key[1] for key in values} == {GPU}


def test_health_that_is_no_longer_read_is_reported_for_an_hour_while_its_gpu_is_there() -> None:
    reported, over = Reports(), MAX_AGE_NS // SECOND_NS
    reported.at(0, healthy())
    reported.at(over, throttled(0))
    there, gone = reported.at(over, throttled(0)), reported.at(over + 20, throttled(0))

    assert there is None
    assert gone is not None
    assert {key[0] for key in gone} == {REASON}


def test_after_a_clock_is_set_back_reports_wait_at_most_one_interval() -> None:
    reported = Reports()
    reported.at(1000, healthy())

    assert reported.at(0, healthy()) is None
    assert reported.at(10, healthy()) is not None


def test_a_node_that_reports_ever_new_gpus_takes_bounded_memory() -> None:
    reported = Reports()
    for number in range(MAX_GPUS + 50):
        reported.at(0, healthy(uuid=f"GPU-{number}"))

    assert len(reported.known.gpus) == MAX_GPUS
    assert reported.known.size_bytes > 0


def test_readings_of_more_gpus_than_a_node_can_have_are_refused() -> None:
    many = [healthy(uuid=f"GPU-{number}") for number in range(MAX_GPUS + 1)]

    with pytest.raises(ValueError, check=has_words("gpus", str(MAX_GPUS))):
        Reports().at(0, *many)


def test_bytes_of_links_are_exact_counters_by_link_and_direction() -> None:
    reported = Reports()
    counted = details(
        traffic=GpuTraffic(
            pcie_sent_bytes_total=2**53 - 1,
            pcie_received_bytes_total=40,
            nvlink_sent_bytes_total=50,
            nvlink_received_bytes_total=60,
        )
    )
    reported.at(0, counted)

    assert reported.at(10, counted) == {
        SENT: 2**53 - 1,
        (LINK, GPU, "pcie", "received"): 40,
        (LINK, GPU, "nvlink", "sent"): 50,
        (LINK, GPU, "nvlink", "received"): 60,
    }


def test_traffic_that_was_not_read_for_a_minute_is_no_longer_reported() -> None:
    reported = Reports()
    reported.at(0, details(traffic=GpuTraffic(pcie_sent_bytes_total=30)))
    assert SENT in (reported.at(10, healthy()) or {})

    for second in range(20, 61, 10):
        assert SENT in (reported.at(second, healthy()) or {})
    assert SENT not in (reported.at(70, healthy()) or {})


def test_no_reading_has_the_name_of_the_maximum_of_another_series() -> None:
    maxima = {metric.name for family in FAMILIES for metric in maxima_of(family).metrics}
    read = {metric.name for family in HEALTH_FAMILIES for metric in family.metrics}
    assert maxima
    assert maxima & read == set()
