"""Readings on each architecture: all that it supports, and no others."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpuledger.clock import NS_PER_SECOND
from gpuledger.records import GpuHealth, GpuProfiling
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.core.raw import CallGroup, SampleCursor
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.ticks import query_all, tick_gpu
from tests.unit.record_fields import present_in

EPOCH_NS = 1_790_000_000_000_000_000
H100 = "NVIDIA H100 80GB HBM3"
B200 = "NVIDIA B200"
A100 = "NVIDIA A100-SXM4-80GB"


class Machine:
    """A machine with one GPU and one process, read once a second."""

    def __init__(self, model: str, ailments: list[dict[str, Any]] | None = None) -> None:
        process = {
            "command": "train", "gpus": [0], "memory_bytes": 1 << 30,
            "load": {"busy_ratio": 0.6, "mix": {
                "sm_ratio": 0.5, "nvlink_bytes_per_second": 1e9, "decoder_ratio": 0.5,
                "jpeg_ratio": 0.25,
            }},
        }  # fmt: skip
        content = {
            "name": "one",
            "nodes": [{"name": "n", "gpus": {"model": model, "ailments": ailments or []}}],
            "host_processes": [{"node": "n", **process}],
        }
        self.clock = ManualClock(start_ns=EPOCH_NS)
        run = Simulation(parse_scenario(content), epoch_ns=EPOCH_NS, clock=self.clock)
        self.truth = run.node("n").gpus[0]
        library = run.node("n").nvml
        (self.gpu,) = NvmlSession(library, monotonic_ns=self.clock.monotonic_ns).open()
        self._sampler = GpuSampler()

    def ticks(self, count: int) -> Iterator[GpuTick]:
        for _ in range(count):
            self.clock.advance(1)
            answers = query_all(self.gpu, self._sampler.request_tick(is_set_back=False))
            yield tick_gpu(self._sampler, answers, now_ns=self.clock.monotonic_ns())


def last_tick(model: str) -> GpuTick:
    return list(Machine(model).ticks(3))[-1]


@pytest.mark.parametrize("model", [B200, H100, A100, "NVIDIA L4", "Tesla T4"])
def test_no_plausible_reading_is_dropped_or_taken_for_a_reset(model: str) -> None:
    for tick in Machine(model).ticks(5):
        assert not tick.dropped_readings
        assert tick.details.resets is None


def test_a_hopper_has_every_part() -> None:
    details = last_tick(H100).details
    assert details.profiling
    assert details.traffic
    assert details.throttling
    assert details.health
    assert details.limits
    assert set(GpuProfiling.__annotations__) - set(present_in(details.profiling)) == {
        "c2c_sent_bytes_per_second", "c2c_received_bytes_per_second"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model", "absent"),
    [
        (
            "NVIDIA A100-SXM4-80GB",
            ["profiling", "traffic.pcie_sent_bytes_total", "health.retired_pages_pending",
             "health.fabric_state", "temperature_margin_celsius",
             "limits.temperature_margin_slowdown_celsius"],
        ),
        (
            "NVIDIA L4",
            ["profiling", "traffic", "memory_temperature_celsius", "health.nvlink_replays_total",
             "health.nvlink_link_sent_bytes_totals",
             "limits.temperature_slowdown_celsius",
             "limits.temperature_margin_memory_max_celsius"],
        ),
        (
            "Tesla T4",
            ["profiling", "traffic", "power_instant_milliwatts", "health.remapped_rows_pending",
             "health.sram_corrected_total"],
        ),
    ],
)  # fmt: skip
def test_readings_that_an_architecture_lacks_are_absent(model: str, absent: list[str]) -> None:
    details = last_tick(model).details
    for name in absent:
        part, _, field = name.rpartition(".")
        owner = getattr(details, part) if part else details
        assert getattr(owner, field, None) is None, name
    assert details.throttling
    assert details.throttling.power_ns_total == 0
    assert details.limits
    assert details.limits.power_limit_enforced_milliwatts


@pytest.mark.parametrize(("model", "links"), [(H100, 18), ("NVIDIA A100-SXM4-80GB", 12)])
def test_the_bytes_of_the_links_add_up_to_their_total(model: str, links: int) -> None:
    details = last_tick(model).details
    assert details.traffic
    assert details.health
    for each, every in (
        (details.health.nvlink_link_sent_bytes_totals, details.traffic.nvlink_sent_bytes_total),
        (
            details.health.nvlink_link_received_bytes_totals,
            details.traffic.nvlink_received_bytes_total,
        ),
    ):
        assert each
        assert list(each) == [str(link) for link in range(links)]
        assert sum(each.values()) == every


LINK_FAULT = {
    "nvlink": 5,
    "nvlink_replays": 2,
    "nvlink_recoveries": 3,
    "nvlink_failed_recoveries": 1,
    "nvlink_symbol_errors": 4,
    "nvlink_inactive": True,
}


def errors_of(health: GpuHealth) -> dict[str, object]:
    """Return the NVLink error readings; per link as (normal link, faulty link)."""
    found: dict[str, object] = {}
    for name, value in present_in(health).items():
        if name.startswith("nvlink_link_") and "_bytes_" not in name:
            assert isinstance(value, dict)
            assert list(value) == [str(link) for link in range(18)]
            found[name.removeprefix("nvlink_link_")] = (value["0"], value["5"])
        elif name.startswith("nvlink_") and "_bytes_" not in name:
            found[name] = value
    return found


def test_nvlink_errors_are_read_in_the_form_of_each_generation() -> None:
    expected: dict[str, dict[str, object]] = {
        A100: {
            "nvlink_crc_flit_errors_total": 0,
            "nvlink_crc_data_errors_total": 0,
            "nvlink_replays_total": 2,
            "nvlink_recoveries_total": 3,
        },
        H100: {
            "states": ("active", "inactive"),
            "replays_totals": (0, 2),
            "recoveries_totals": (0, 3),
            "crc_errors_totals": (0, 0),
        },
        B200: {
            "states": ("active", "inactive"),
            "successful_recoveries_totals": (0, 3),
            "failed_recoveries_totals": (0, 1),
            "symbol_errors_totals": (0, 4),
            "effective_bit_error_ratios": (15e-255, 15e-255),
            "symbol_bit_error_ratios": (15e-255, 4e-12),
            **{
                f"{name}_totals": (0, 0)
                for name in (
                    "malformed_packets", "buffer_overruns", "receive_errors",
                    "receive_remote_errors", "receive_general_errors", "integrity_errors",
                    "discards", "effective_errors",
                )
            },
        },
    }  # fmt: skip
    for model, errors in expected.items():
        *_, tick = Machine(model, [LINK_FAULT]).ticks(3)
        assert tick.details.health
        found = errors_of(tick.details.health)
        history = found.pop("fec_history_totals", None)
        assert found == errors
        if model == B200:
            assert isinstance(history, tuple)
            well, ill = history
            assert [len(well), len(ill)] == [16, 16]
            assert (well[0] - ill[0], ill[1:3], well[1:3]) == (4, [4, 0], [0, 0])


def test_the_bits_of_fabric_health_become_conditions() -> None:
    *_, tick = Machine(H100, [{"fabric": ["route_unhealthy", "access_timeout"]}]).ticks(2)
    assert tick.details.health
    reported = {
        name.removeprefix("fabric_"): value
        for name, value in present_in(tick.details.health).items()
        if name.startswith("fabric_") and isinstance(value, bool)
    }
    assert reported == {
        "bandwidth_degraded": False,
        "route_recovery": False,
        "route_unhealthy": True,
        "access_timeout": True,
    }


def test_the_pcie_link_is_read_with_its_errors_and_its_capability() -> None:
    fault = {"pcie_corrected": 7, "pcie_fatal": 1, "pcie_width": 8, "pcie_generation": 3}
    *_, tick = Machine(H100, [fault]).ticks(2)
    assert tick.details.health
    reported = {
        name.removeprefix("pcie_"): value
        for name, value in present_in(tick.details.health).items()
        if name.startswith("pcie_") and value
    }
    assert reported == {
        "correctable_errors_total": 7,
        "fatal_errors_total": 1,
        "link_generation": 3,
        "link_width": 8,
        "max_link_generation": 5,
        "max_link_width": 16,
    }


def test_the_rates_of_the_links_add_up_to_their_total() -> None:
    details = last_tick(H100).details
    health, profiling = details.health, details.profiling
    assert health
    assert profiling
    for each, every in (
        (health.nvlink_link_sent_bytes_per_second, profiling.nvlink_sent_bytes_per_second),
        (health.nvlink_link_received_bytes_per_second, profiling.nvlink_received_bytes_per_second),
    ):
        assert each
        assert list(each) == [str(link) for link in range(18)]
        # Each is a whole number of bytes.
        assert sum(each.values()) == pytest.approx(every, abs=len(each))


def test_the_rate_of_a_link_covers_all_the_time_since_the_last_health_query() -> None:
    machine = Machine(H100)
    machine.gpu.query(CallGroup.HEALTH, SampleCursor())
    for _ in range(10):
        machine.clock.advance(1)
        machine.gpu.query(CallGroup.PROFILING, SampleCursor())
    health = machine.gpu.query(CallGroup.HEALTH, SampleCursor())["health"]
    moved = machine.truth.mixed_ns("nvlink_bytes_per_second", 0, 10 * NS_PER_SECOND)
    rates = health["health.nvlink_link_sent_bytes_per_second"]
    assert rates[17] == pytest.approx(moved / (10 * NS_PER_SECOND) / 18 / (1 << 20))


@pytest.mark.parametrize("model", [H100, "NVIDIA L4"])
def test_the_margin_is_the_distance_to_the_limit_temperature(model: str) -> None:
    tick = last_tick(model)
    details, limits = tick.details, tick.details.limits
    assert limits
    assert tick.reading.temperature_celsius is not None
    assert details.temperature_margin_celsius == 87 - tick.reading.temperature_celsius
    assert limits.temperature_margin_max_celsius == 0
    assert limits.temperature_margin_slowdown_celsius == -2
    assert limits.temperature_margin_shutdown_celsius == -8


def test_the_maximum_clock_equals_the_clock_under_load() -> None:
    tick = last_tick(H100)
    assert tick.details.limits
    assert tick.details.limits.sm_clock_max_hertz == tick.reading.sm_clock_hertz
    assert tick.details.limits.memory_clock_max_hertz == tick.reading.memory_clock_hertz


def test_a_process_has_the_use_of_its_video_engines() -> None:
    (usage,) = last_tick(H100).usages
    assert usage.sm_ratio
    # The driver returns whole percents of windows.
    assert usage.decoder_ratio == pytest.approx(usage.sm_ratio / 2, abs=0.01)
    assert usage.encoder_ratio is None


def test_the_engines_report_the_utilization_of_their_last_window() -> None:
    details = last_tick(H100).details
    assert details.decoder_utilization_ratio
    assert details.jpeg_utilization_ratio == pytest.approx(
        details.decoder_utilization_ratio / 2, abs=0.01
    )
    assert details.optical_flow_utilization_ratio == 0.0


def test_profiling_values_match_the_true_use_between_two_ticks() -> None:
    machine = Machine(H100)
    for place, tick in enumerate(machine.ticks(4)):
        profiling = tick.details.profiling
        assert (profiling is None) == (place == 0)
        if profiling:
            busy_ns = machine.truth.device_busy_ns(
                place * NS_PER_SECOND, (place + 1) * NS_PER_SECOND
            )
            busy = busy_ns / NS_PER_SECOND
            assert profiling.graphics_engine_active_ratio == round(busy, 6)
            assert profiling.sm_active_ratio == pytest.approx(0.5 * busy, abs=1e-6)
            assert profiling.nvlink_sent_bytes_per_second == pytest.approx(1e9 * busy)


def test_an_ailment_is_reported_while_it_lasts() -> None:
    ailment = {"start_seconds": 1.5, "end_seconds": 3.5, "throttle": "power", "recovery": "reset",
               "ecc_uncorrected": 1}  # fmt: skip
    seen = []
    for tick in Machine(H100, [ailment]).ticks(4):
        throttling, health = tick.details.throttling, tick.details.health
        assert throttling
        assert health
        seen.append(
            (
                throttling.reasons,
                throttling.power_ns_total,
                health.recovery_action,
                health.ecc_uncorrected_volatile_total,
            )
        )
    assert seen == [
        (0, 0, "none", 0),
        (4, 500_000_000, "reset", 1),
        (4, 1_500_000_000, "reset", 1),
        (0, 2_000_000_000, "none", 1),
    ]
