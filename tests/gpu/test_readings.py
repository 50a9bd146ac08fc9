"""The catalogue on this machine's own GPUs: what no simulation can tell.

Run it where NVML answers: `.venv/bin/python -m pytest tests/gpu -s`; it prints what the driver
refuses, how long the groups take and how wide the byte counters look. Without NVML it is skipped.
"""
# ruff: noqa: T201  # what it prints is for whoever runs it

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pynvml
import pytest

from gpuledger.records import GpuFacts
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick
from gpuledger_agent.core.raw import CallGroup, RawGpuSample
from gpuledger_agent.gpu.nvidia.catalogue import EACH_LINK, FieldValue, specs_for
from gpuledger_agent.gpu.nvidia.gpm import is_of_chip
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from tests.ticks import tick_gpu

TICKS = 6
MAX_SECONDS = {
    CallGroup.BOOKS: 0.05,
    CallGroup.SENSORS: 0.1,
    CallGroup.READINGS: 0.05,
    CallGroup.PROFILING: 0.1,
    CallGroup.HEALTH: 0.5,
}


@dataclass
class Watched:
    """One GPU, asked for some seconds."""

    gpu: NvidiaGpu
    answers: list[RawGpuSample] = field(default_factory=list)
    ticks: list[GpuTick] = field(default_factory=list)
    seconds: dict[CallGroup, list[float]] = field(
        default_factory=lambda: {group: [] for group in CallGroup}
    )
    _sampler: GpuSampler = field(default_factory=GpuSampler)
    _requested_ns: int = 0

    @property
    def facts(self) -> GpuFacts:
        found = self.answers[-1].facts
        assert found
        return found

    def ask(self) -> None:
        now_ns = time.monotonic_ns()
        interval_ns, self._requested_ns = now_ns - (self._requested_ns or now_ns - 10**9), now_ns
        seen = self._sampler.request_tick(is_set_back=False)
        given: dict[str, object] = {}
        for group in CallGroup:
            began = time.perf_counter()
            given |= self.gpu.query(group, seen)
            self.seconds[group].append(time.perf_counter() - began)
        answers = RawGpuSample(uuid=self.gpu.uuid, index=self.gpu.index, **given)  # type: ignore[arg-type]  # the groups' fields
        tick = tick_gpu(self._sampler, answers, now_ns=now_ns, interval_ns=interval_ns)
        self.answers.append(answers)
        self.ticks.append(tick)


@pytest.fixture(scope="module")
def watched() -> Iterator[list[Watched]]:
    nvml = NvmlSession(pynvml)
    try:
        found = [Watched(gpu) for gpu in nvml.open()]
    except SourceLostError as error:
        pytest.skip(f"no GPU to look at: {error}")
    for _ in range(TICKS):
        for one in found:
            one.ask()
        time.sleep(1)
    yield found
    nvml.close()


def test_nothing_that_a_healthy_gpu_says_is_taken_for_untrue(watched: list[Watched]) -> None:
    for one in watched:
        dropped = [dict(tick.dropped_readings) for tick in one.ticks]
        assert not any(dropped), (one.facts.model, dropped)


def test_no_counter_falls_while_nothing_happens(watched: list[Watched]) -> None:
    for one in watched:
        assert [tick.details.resets for tick in one.ticks] == [None] * TICKS, one.facts.model


def test_a_group_is_answered_fast_enough_once_it_was_probed(watched: list[Watched]) -> None:
    for one in watched:
        for group, limit in MAX_SECONDS.items():
            took = sorted(one.seconds[group][1:])[TICKS // 2 - 1]
            print(f"{one.facts.model}: {group.value} {took * 1000:.2f} ms")
            assert took < limit, (one.facts.model, group)


def test_the_gpu_says_what_it_is(watched: list[Watched]) -> None:
    for one in watched:
        facts = one.facts
        assert facts.architecture, facts
        assert facts.pci_bus_id
        assert facts.vbios_version
        assert facts.memory_total_bytes
        assert facts.compute_capability
        assert len(facts.nvlink_peers or {}) in (0, len(watched) - 1)


def test_what_is_refused_is_told_with_its_reason(watched: list[Watched]) -> None:
    for one in watched:
        refused = [f"{a.call} {a.reason}" for a in one.facts.capabilities if not a.supported]
        print(f"{one.facts.model} refuses: {', '.join(refused) or 'nothing'}")
        assert all(a.reason for a in one.facts.capabilities if not a.supported)


def test_every_reading_is_given_or_refused(watched: list[Watched]) -> None:
    """A reading that is neither fails each time, or its question is wrong."""
    for one in watched:
        last = one.answers[-1]
        given = {
            **last.sensors,
            **last.activity,
            **last.readings,
            **last.profiling,
            **last.health,
        }
        requested = [
            reading
            for group in CallGroup
            if group is not CallGroup.BOOKS
            for reading in specs_for(group, one.gpu.driver)
        ]
        outcomes = one.gpu.client.outcomes
        no_profiling = outcomes.get(("nvmlGpmMetricsGet",)) is not None
        for reading in requested:
            if any(
                isinstance(one, FieldValue) and one.link == EACH_LINK for one in reading.sources
            ):
                continue  # it has as many questions as there are links
            refused = all(outcomes.get(question.key) for question in reading.sources)
            is_profiling = is_of_chip(reading)
            if reading.name in given or refused or (is_profiling and no_profiling):
                continue
            print(f"{one.facts.model}: {reading.name} is neither given nor refused")
            assert is_profiling or reading.name == "health.vgpu_license_status", reading.name


def test_hopper_and_newer_have_the_chips_counters(watched: list[Watched]) -> None:
    for one in watched:
        if one.facts.architecture in ("hopper", "blackwell", "rubin"):
            profiling = one.ticks[-1].details.profiling
            assert profiling, one.facts.model
            assert profiling.graphics_engine_active_ratio is not None
            assert profiling.sm_active_ratio is not None
            assert profiling.dram_active_ratio is not None
            reading = one.ticks[-1].reading
            assert reading.sm_active_ratio == profiling.sm_active_ratio
            assert reading.tensor_active_ratio == profiling.tensor_active_ratio
            assert reading.dram_active_ratio == profiling.dram_active_ratio


def test_the_chips_counters_agree_with_the_drivers_utilization(watched: list[Watched]) -> None:
    for one in watched:
        for tick in one.ticks[2:]:
            profiling, coarse = tick.details.profiling, tick.reading.utilization_ratio
            if profiling and profiling.graphics_engine_active_ratio is not None:
                assert coarse is not None
                print(
                    f"{one.facts.model}: {profiling.graphics_engine_active_ratio:.3f} {coarse:.3f}"
                )
                # The driver calls a window busy in which any kernel ran, the chip counts cycles.
                assert profiling.graphics_engine_active_ratio <= coarse + 0.25


def test_the_average_draw_and_that_of_the_instant_are_of_one_board(watched: list[Watched]) -> None:
    for one in watched:
        reading, details = one.ticks[-1].reading, one.ticks[-1].details
        limits = details.limits
        if details.power_instant_milliwatts is not None and reading.power_milliwatts is not None:
            assert details.power_instant_milliwatts == pytest.approx(
                reading.power_milliwatts, rel=0.5
            )
        if limits and limits.power_limit_max_milliwatts and reading.power_milliwatts is not None:
            assert reading.power_milliwatts < limits.power_limit_max_milliwatts * 1.2


def test_the_links_carry_together_what_all_of_them_carry(watched: list[Watched]) -> None:
    """Each tick asks for the sum before the links, so theirs lies between two sums."""
    for one in watched:
        for before, after in pairwise(tick.details for tick in one.ticks):
            links = before.health and before.health.nvlink_link_sent_bytes_totals
            if not links or not before.traffic or not after.traffic:
                print(f"{one.facts.model}: no single links")
                continue
            sums = (before.traffic.nvlink_sent_bytes_total, after.traffic.nvlink_sent_bytes_total)
            print(f"{one.facts.model}: {len(links)} links, {sum(links.values())} of {sums}")
            assert None not in sums
            slack = 1024 * len(links)  # each counts whole KiB
            assert (sums[0] or 0) - slack <= sum(links.values()) <= (sums[1] or 0) + slack


def test_how_wide_the_byte_counters_are(watched: list[Watched]) -> None:
    """Prints the type and the values: one above 2^32 settles that they do not wrap there."""
    for one in watched:
        try:
            values = pynvml.nvmlDeviceGetFieldValues(one.gpu.handle, [197, 198])
        except pynvml.NVMLError as error:
            print(f"{one.facts.model}: {error}")
            continue
        for value in values:
            print(
                f"{one.facts.model}: field {value.fieldId} code {value.nvmlReturn} type"
                f" {value.valueType} value {value.value.ullVal}"
            )
        traffic = one.ticks[-1].details.traffic
        if traffic and traffic.pcie_sent_bytes_total is not None:
            before = one.ticks[0].details.traffic
            assert before
            assert traffic.pcie_sent_bytes_total >= (before.pcie_sent_bytes_total or 0)
