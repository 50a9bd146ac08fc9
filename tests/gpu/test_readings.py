"""The catalogue on this machine's GPUs, for facts that a simulation cannot show.

Run it on a machine with NVML: `.venv/bin/python -m pytest tests/gpu -s`. It prints which readings
the driver refuses, how long each group takes, and how wide the byte counters seem to be. It is
skipped without NVML.
"""
# ruff: noqa: T201  # the output is for the person who runs it

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
    CallGroup.USAGE: 0.05,
    CallGroup.SENSORS: 0.1,
    CallGroup.READINGS: 0.05,
    CallGroup.PROFILING: 0.1,
    CallGroup.HEALTH: 0.5,
}


@dataclass
class Watched:
    """One GPU and its readings over some seconds."""

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

    def query(self) -> None:
        now_ns = time.monotonic_ns()
        interval_ns, self._requested_ns = now_ns - (self._requested_ns or now_ns - 10**9), now_ns
        seen = self._sampler.request_tick(is_set_back=False)
        given: dict[str, object] = {}
        for group in CallGroup:
            began = time.perf_counter()
            given |= self.gpu.query(group, seen)
            self.seconds[group].append(time.perf_counter() - began)
        answers = RawGpuSample(uuid=self.gpu.uuid, index=self.gpu.index, **given)  # type: ignore[arg-type]  # the fields of the groups
        tick = tick_gpu(self._sampler, answers, now_ns=now_ns, interval_ns=interval_ns)
        self.answers.append(answers)
        self.ticks.append(tick)


@pytest.fixture(scope="module")
def watched() -> Iterator[list[Watched]]:
    nvml = NvmlSession(pynvml)
    try:
        found = [Watched(gpu) for gpu in nvml.open()]
    except SourceLostError as error:
        pytest.skip(f"no usable GPU: {error}")
    for _ in range(TICKS):
        for one in found:
            one.query()
        time.sleep(1)
    yield found
    nvml.close()


def test_no_reading_of_a_healthy_gpu_is_dropped_as_implausible(watched: list[Watched]) -> None:
    for one in watched:
        dropped = [dict(tick.dropped_readings) for tick in one.ticks]
        assert not any(dropped), (one.facts.model, dropped)


def test_no_counter_falls_while_nothing_happens(watched: list[Watched]) -> None:
    for one in watched:
        assert [tick.details.resets for tick in one.ticks] == [None] * TICKS, one.facts.model


def test_a_group_is_read_fast_enough_after_its_first_query(watched: list[Watched]) -> None:
    for one in watched:
        for group, limit in MAX_SECONDS.items():
            took = sorted(one.seconds[group][1:])[TICKS // 2 - 1]
            print(f"{one.facts.model}: {group.value} {took * 1000:.2f} ms")
            assert took < limit, (one.facts.model, group)


def test_the_gpu_reports_its_identity(watched: list[Watched]) -> None:
    for one in watched:
        facts = one.facts
        assert facts.architecture, facts
        assert facts.pci_bus_id
        assert facts.vbios_version
        assert facts.memory_total_bytes
        assert facts.compute_capability
        assert len(facts.nvlink_peers or {}) in (0, len(watched) - 1)


def test_a_refused_call_is_reported_with_its_reason(watched: list[Watched]) -> None:
    for one in watched:
        refused = [f"{a.call} {a.reason}" for a in one.facts.capabilities if not a.supported]
        print(f"{one.facts.model} refuses: {', '.join(refused) or 'nothing'}")
        assert all(a.reason for a in one.facts.capabilities if not a.supported)


def test_every_reading_is_returned_or_refused(watched: list[Watched]) -> None:
    """A reading that is neither fails every time, or its query is wrong."""
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
            if group is not CallGroup.USAGE
            for reading in specs_for(group, one.gpu.driver)
        ]
        outcomes = one.gpu.client.outcomes
        no_profiling = outcomes.get(("nvmlGpmMetricsGet",)) is not None
        for reading in requested:
            if any(
                isinstance(one, FieldValue) and one.link == EACH_LINK for one in reading.sources
            ):
                continue  # it has as many queries as there are links
            refused = all(outcomes.get(question.key) for question in reading.sources)
            is_profiling = is_of_chip(reading)
            if reading.name in given or refused or (is_profiling and no_profiling):
                continue
            print(f"{one.facts.model}: {reading.name} is neither returned nor refused")
            assert is_profiling or reading.name == "health.vgpu_license_status", reading.name


def test_hopper_and_newer_report_the_chips_counters(watched: list[Watched]) -> None:
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
                # The driver calls a window busy if any kernel ran in it; the chip counts cycles.
                assert profiling.graphics_engine_active_ratio <= coarse + 0.25


def test_average_and_instantaneous_power_agree(watched: list[Watched]) -> None:
    for one in watched:
        reading, details = one.ticks[-1].reading, one.ticks[-1].details
        limits = details.limits
        if details.power_instant_milliwatts is not None and reading.power_milliwatts is not None:
            assert details.power_instant_milliwatts == pytest.approx(
                reading.power_milliwatts, rel=0.5
            )
        if limits and limits.power_limit_max_milliwatts and reading.power_milliwatts is not None:
            assert reading.power_milliwatts < limits.power_limit_max_milliwatts * 1.2


def test_the_bytes_of_the_links_add_up_to_their_total(watched: list[Watched]) -> None:
    """Each tick reads the total before the links, so their sum lies between two totals."""
    for one in watched:
        for before, after in pairwise(tick.details for tick in one.ticks):
            links = before.health and before.health.nvlink_link_sent_bytes_totals
            if not links or not before.traffic or not after.traffic:
                print(f"{one.facts.model}: no per-link counters")
                continue
            sums = (before.traffic.nvlink_sent_bytes_total, after.traffic.nvlink_sent_bytes_total)
            print(f"{one.facts.model}: {len(links)} links, {sum(links.values())} of {sums}")
            assert None not in sums
            slack = 1024 * len(links)  # each counts whole KiB
            assert (sums[0] or 0) - slack <= sum(links.values()) <= (sums[1] or 0) + slack


def test_the_byte_counters_do_not_fall(watched: list[Watched]) -> None:
    """Prints type and value: a value above 2^32 proves that the counter does not wrap there."""
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
