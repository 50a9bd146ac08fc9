"""One GPU: means over the covered time, differences of counters, only plausible values."""

from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import BusyMethod, ProcessKind
from gpuledger_agent.core.gpu_sampler import GpuSampler, GpuTick, LastTick
from gpuledger_agent.core.normalize.driver_clock import DriverClock
from gpuledger_agent.core.normalize.shares import GoneProcess, ProcessUsage
from gpuledger_agent.core.normalize.windows import WindowLength
from gpuledger_agent.core.raw import (
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from tests.ticks import tick_gpu

SECOND_NS = 1_000_000_000
WINDOW_US = 200_000
START_US = 1_000_000_000


def samples(*percents: int, start: int = 0) -> tuple[UtilizationSample, ...]:
    return tuple(
        UtilizationSample(timestamp_us=START_US + (start + place + 1) * WINDOW_US, percent=percent)
        for place, percent in enumerate(percents)
    )


def uses(pid: int, *percents: int, start: int = 0) -> tuple[ProcessUtilizationSample, ...]:
    return tuple(
        ProcessUtilizationSample(
            pid=pid,
            timestamp_us=START_US + (start + place + 1) * WINDOW_US,
            sm_percent=percent,
            memory_percent=percent // 2,
        )
        for place, percent in enumerate(percents)
        if percent
    )


def compute(pid: int, memory_bytes: int | None = 10) -> ListedProcess:
    return ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=memory_bytes)


BLANK = RawGpuSample(uuid="GPU-0", index=0)


def primed(**last: Any) -> GpuSampler:  # noqa: ANN401  # fields of LastTick
    """Return a GPU with a known driver's clock: a tick covers five of a second's six windows."""
    gpu = GpuSampler()
    gpu.window = WindowLength(length_us=WINDOW_US, is_confirmed=True)
    gpu.last = LastTick(
        last_seen=SampleCursor(gpu_us=START_US, memory_us=START_US, process_us=START_US),
        clock=DriverClock(
            earliest_us=START_US + 1.5 * WINDOW_US,
            latest_us=START_US + 1.5 * WINDOW_US,
            covered_us=START_US,
        ),
        **last,
    )
    return gpu


def read(answers: RawGpuSample, gpu: GpuSampler | None = None, seconds: float = 1.0) -> GpuTick:
    gpu, interval_ns = gpu or primed(), round(seconds * SECOND_NS)
    gpu.request_tick(is_set_back=False)
    return tick_gpu(gpu, answers, now_ns=gpu.last.read_ns + interval_ns, interval_ns=interval_ns)


def usage(tick: GpuTick, pid: int) -> ProcessUsage:
    return next(one for one in tick.usages if one.process.pid == pid)


def test_utilization_is_the_mean_of_all_windows_of_the_covered_time() -> None:
    tick = read(replace(BLANK, samples=samples(100, 50, 0, 0, 0, 100)))
    assert tick.reading.utilization_ratio == pytest.approx(0.3)
    assert tick.last.last_seen.gpu_us == START_US + 5 * WINDOW_US


def test_a_window_on_the_border_of_two_ticks_is_split_between_them() -> None:
    early, late = (100, 0, 0, 0, 80), (80, 0, 0, 0, 0, 0)
    gpu = primed(window_us=WINDOW_US)
    first = read(
        replace(
            BLANK,
            samples=samples(*early),
            memory_samples=samples(*early),
            process_samples=uses(7, *early),
            processes=(compute(7),),
        ),
        gpu,
        seconds=0.86,
    )
    assert first.last.last_seen.gpu_us == START_US + 4 * WINDOW_US
    second = read(
        replace(
            BLANK,
            samples=samples(*late, start=4),
            memory_samples=samples(*late, start=4),
            process_samples=uses(7, *late, start=4),
            processes=(compute(7),),
        ),
        gpu,
        seconds=1.0,
    )
    for tick, seconds, busy in ((first, 0.86, 0.2 + 0.06 * 0.8), (second, 1.0, 0.14 * 0.8)):
        share = pytest.approx(busy / seconds)
        assert tick.reading.utilization_ratio == share
        assert tick.reading.memory_utilization_ratio == share
        assert usage(tick, 7).sm_ratio == share


def second_of(
    number: int, percents: tuple[int, ...], own: dict[int, tuple[int, ...]], lost: int | None = None
) -> RawGpuSample:
    """Return the answer to a tick's query each second; `lost` is a window without a sample."""
    start, of_gpu = 5 * number, samples(*percents, start=5 * number)
    return replace(
        BLANK,
        samples=tuple(one for place, one in enumerate(of_gpu) if place != lost),
        process_samples=tuple(
            one for pid, shares in own.items() for one in uses(pid, *shares, start=start)
        ),
        processes=tuple(compute(pid) for pid in own),
    )


def test_the_mean_of_the_other_windows_applies_to_lost_ones() -> None:
    gpu, used = primed(window_us=WINDOW_US), (80,) * 6
    ticks = [read(second_of(number, used, {7: used}, lost=2), gpu) for number in range(6)]
    # A hole is unknown until process samples have shown that the GPU was used in it.
    assert ticks[0].reading.utilization_ratio is None
    assert ticks[-1].reading.utilization_ratio == pytest.approx(0.8)
    assert ticks[-1].reading.busy_method is BusyMethod.SAMPLED


@pytest.mark.parametrize(
    ("law", "own", "method"),
    [
        ("samples of all windows are measured", (30,) * 6, None),
        ("a few may be missing because of an end", (30, 30, 30, 30, 0, 30), None),
        ("a third of the windows is more", (30, 0, 0, 0, 30, 30), BusyMethod.PARTIAL_SAMPLES),
    ],
)
def test_shares_are_estimates_if_many_windows_lack_process_samples(
    law: str, own: tuple[int, ...], method: BusyMethod | None
) -> None:
    gpu, whole = primed(window_us=WINDOW_US), (30,) * 6
    for number in range(9):
        # Not in all ticks, so that the windows count and not a tick's sum.
        second = own if number % 2 == 0 else whole
        read(second_of(number, (60,) * 6, {7: whole, 8: second}), gpu)
    last = read(second_of(9, (60,) * 6, {7: whole, 8: whole}), gpu)
    assert last.reading.busy_method == method, law


ALL = (1, 1, 1, 1, 1, 1)
TWO_OF_FIVE = (1, 0, 0, 1, 0, 1)


@pytest.mark.parametrize(
    ("law", "own", "expected"),
    [
        ("the rest is the other's", {7: (50, ALL), 8: (10, TWO_OF_FIVE)}, [0.5, 0.1]),
        ("also if three run", {7: (30, ALL), 8: (20, ALL), 9: (10, TWO_OF_FIVE)}, [0.3, 0.2, 0.1]),
        (
            "unknown whose if two have none",
            {7: (30, ALL), 8: (20, TWO_OF_FIVE), 9: (10, TWO_OF_FIVE)},
            [0.3, 0.08, 0.04],
        ),
        ("an idle process ran nothing", {7: (20, ALL), 8: (0, ALL)}, [0.2, 0.0]),
        (
            "nor more than it shows if samples understate use",
            {7: (20, ALL), 8: (5, TWO_OF_FIVE)},
            [0.2, 0.02],
        ),
    ],
)
def test_use_that_no_sample_of_a_window_shows_belongs_to_the_only_process_without_one(
    law: str, own: dict[int, tuple[int, tuple[int, ...]]], expected: list[float]
) -> None:
    """Provided that the samples add up to the GPU's use in the windows that have all of them."""
    shown = {pid: tuple(percent * has for has in each) for pid, (percent, each) in own.items()}
    gpu = primed(window_us=WINDOW_US)
    ticks = [read(second_of(number, (60,) * 6, shown), gpu) for number in range(9)]
    assert [one.sm_ratio for one in ticks[-1].usages] == pytest.approx(expected), law
    assert ticks[-1].reading.busy_method is BusyMethod.PARTIAL_SAMPLES, law


def test_utilization_falls_back_to_the_drivers_latest_window() -> None:
    assert read(replace(BLANK, samples=None, percent=42)).reading.utilization_ratio == 0.42
    assert read(BLANK).reading.utilization_ratio is None


@pytest.mark.parametrize(
    ("field", "value", "reading"),
    [
        ("samples", samples(4294967295), "utilization_ratio"),
        ("percent", 101, "utilization_ratio"),
        ("memory_percent", 300, "memory_utilization_ratio"),
        ("memory_total_bytes", 2**64 - 1, "memory_total_bytes"),
        ("memory_used_bytes", 2**64 - 1, "memory_used_bytes"),
        ("memory_reserved_bytes", 2**64 - 1, "memory_reserved_bytes"),
        ("power_milliwatts", 3_000_001, "power_milliwatts"),
        ("sensors", {"temperature_celsius": 151}, "temperature_celsius"),
        ("sensors", {"temperature_celsius": -21}, "temperature_celsius"),
        ("sensors", {"sm_clock_hertz": 2**32 - 1}, "sm_clock_hertz"),
        ("sensors", {"memory_clock_hertz": 2**32 - 1}, "memory_clock_hertz"),
        ("energy_millijoules", 2**64 - 1, "energy_total_millijoules"),
    ],
)
def test_an_implausible_value_is_absent_and_counted(
    field: str, value: object, reading: str
) -> None:
    tick = read(replace(BLANK, **{field: value}))
    assert getattr(tick.reading, reading) is None
    assert tick.dropped_readings.total() == 1


def test_more_memory_in_use_than_installed_is_implausible() -> None:
    tick = read(replace(BLANK, memory_total_bytes=100, memory_used_bytes=101))
    assert tick.reading.memory_used_bytes is None
    assert dict(tick.dropped_readings) == {("memory_used_bytes", "out_of_range"): 1}


def test_the_limits_themselves_are_plausible() -> None:
    full = replace(
        BLANK, samples=samples(100), sensors={"temperature_celsius": 150}, memory_total_bytes=9,
        memory_used_bytes=9, power_milliwatts=0,
    )  # fmt: skip
    assert not read(full).dropped_readings


def test_a_gpu_that_was_unresponsive_reports_nothing_from_before_the_interval() -> None:
    answers = replace(
        BLANK,
        samples=samples(*[90] * 20, *[10] * 6),
        process_samples=uses(7, *[90] * 20, *[10] * 6),
        processes=(compute(7),),
    )
    tick = read(answers, GpuSampler())
    assert tick.reading.utilization_ratio == pytest.approx(0.1)
    assert usage(tick, 7).sm_ratio == pytest.approx(0.1)


def test_the_drivers_clock_is_found_again_after_it_was_set_back() -> None:
    ahead = SampleCursor(gpu_us=2 * START_US, memory_us=2 * START_US, process_us=2 * START_US)
    gpu = GpuSampler()
    gpu.last = LastTick(last_seen=ahead)
    for _ in range(6):
        read(replace(BLANK, samples=()), gpu)
    assert gpu.last.last_seen == SampleCursor()
    tick = read(replace(BLANK, samples=samples(*[90] * 20, *[10] * 6)), gpu)
    assert tick.reading.utilization_ratio == pytest.approx(0.1)
    assert tick.last.last_seen.gpu_us == START_US + 25 * WINDOW_US


def test_after_a_clock_was_set_back_processes_that_ended_before_are_not_listed() -> None:
    gone = GoneProcess(process=compute(7), until_us=3 * START_US)
    gpu = primed(gone={7: gone})
    assert [one.process.pid for one in read(replace(BLANK, samples=()), gpu).usages] == [7]
    for _ in range(6):
        read(replace(BLANK, samples=()), gpu)
    tick = read(replace(BLANK, samples=samples(*[90] * 20, *[10] * 6)), gpu)
    assert (tick.usages, tick.last.gone) == ([], {})


# The processes' shares.


def test_a_share_adds_up_all_windows_of_the_interval() -> None:
    answers = replace(
        BLANK,
        samples=samples(60, 60, 60, 0, 0, 0),
        process_samples=uses(7, 40, 40, 40) + uses(8, 0, 20, 20),
        processes=(compute(7), compute(8)),
    )
    tick = read(answers)
    assert usage(tick, 7).sm_ratio == pytest.approx(1.2 / 5)
    assert usage(tick, 8).sm_ratio == pytest.approx(0.4 / 5)
    assert tick.last.last_seen.process_us == START_US + 3 * WINDOW_US


def test_a_fully_busy_process_has_a_share_of_one_whatever_the_number_of_windows() -> None:
    for count in (4, 5, 6):
        answers = replace(
            BLANK,
            samples=samples(*[100] * count),
            process_samples=uses(7, *[100] * count),
            processes=(compute(7),),
        )
        assert usage(read(answers), 7).sm_ratio == pytest.approx(1.0)


def test_one_sample_for_the_whole_interval_is_its_mean() -> None:
    answers = replace(
        BLANK,
        samples=samples(30, 30, 30, 30, 30),
        process_samples=uses(7, 30, start=4),
        processes=(compute(7),),
    )
    assert usage(read(answers), 7).sm_ratio == pytest.approx(0.3)


def test_one_sample_of_an_uncovered_window_is_at_most_the_use_of_the_gpu() -> None:
    answers = replace(
        BLANK,
        samples=samples(0, 0, 0, 0, 50, 0),
        process_samples=uses(7, 50, start=4),
        processes=(compute(7),),
    )
    assert usage(read(answers), 7).sm_ratio == pytest.approx(0.1)


def test_without_samples_of_the_gpu_the_window_is_learned_from_the_processes() -> None:
    gpu = GpuSampler()
    tick = read(
        replace(BLANK, process_samples=uses(7, 50, 50, 50, 50, 50), processes=(compute(7),)), gpu
    )
    assert usage(tick, 7).sm_ratio == pytest.approx(0.5)
    later = replace(BLANK, process_samples=uses(7, 50, start=7), processes=(compute(7),))
    assert usage(read(later, gpu), 7).sm_ratio == pytest.approx(0.1)


def test_a_process_without_samples_has_a_share_of_zero_if_the_driver_has_samples() -> None:
    supported = replace(
        BLANK, samples=samples(*[0] * 6), process_samples=(), processes=(compute(7),)
    )
    assert usage(read(supported), 7).sm_ratio == 0.0


@pytest.mark.parametrize(
    ("law", "answers"),
    [
        ("not supported", replace(BLANK, samples=samples(9), process_samples=None)),
        ("no window has closed yet", replace(BLANK, samples=(), process_samples=())),
    ],
)
def test_an_unmeasured_share_is_absent(law: str, answers: RawGpuSample) -> None:
    tick = read(replace(answers, processes=(compute(7),)))
    assert usage(tick, 7).sm_ratio is None, law


def test_the_memory_of_a_process_on_two_lists_counts_once() -> None:
    listed = (
        compute(7, 40),
        ListedProcess(pid=7, kind=ProcessKind.GRAPHICS, memory_bytes=40),
        ListedProcess(pid=8, kind=ProcessKind.MPS, memory_bytes=None),
    )
    tick = read(replace(BLANK, processes=listed))
    assert [one.process for one in tick.usages] == [
        compute(7, 40),
        ListedProcess(pid=8, kind=ProcessKind.MPS, memory_bytes=None),
    ]


@pytest.mark.parametrize("pid", [0, 2**22 + 1, 2**32 - 1])
def test_an_impossible_pid_is_dropped_and_counted(pid: int) -> None:
    # Rows longer than nvidia-ml-py expects, such as those of driver 535, are misread like this.
    tick = read(RawGpuSample(uuid="GPU-0", index=0, processes=(compute(2**22), compute(pid))))
    assert list(tick.last.processes) == [2**22]
    assert tick.dropped_readings == {("process_pid", "out_of_range"): 1}


def test_an_ended_process_is_listed_until_the_covered_time_passes_its_end() -> None:
    gpu = primed(processes={7: compute(7)}, window_us=WINDOW_US)
    answers = replace(BLANK, process_samples=uses(7, 50, 0, 0, 0, 0, 20), processes=(compute(8),))
    tick = read(replace(answers, samples=samples(*[50] * 6)), gpu)
    listed = [[(one.process.pid, one.ended) for one in tick.usages]]
    shares = [usage(tick, 7).sm_ratio]
    for second in (1, 2):
        tick = read(replace(answers, samples=samples(*[50] * 6, start=5 * second)), gpu)
        listed.append([(one.process.pid, one.ended) for one in tick.usages])
        shares += [one.sm_ratio for one in tick.usages if one.ended]
    assert listed == [[(8, False), (7, True)], [(8, False), (7, True)], [(8, False)]]
    assert shares == pytest.approx([0.1, 0.04])


def test_a_process_that_comes_back_has_not_ended() -> None:
    gpu = primed(processes={7: compute(7)})
    read(replace(BLANK, samples=samples(*[0] * 6), processes=()), gpu)
    back = replace(BLANK, samples=samples(*[0] * 6, start=5), processes=(compute(7),))
    assert [(one.process.pid, one.ended) for one in read(back, gpu).usages] == [(7, False)]


def test_a_list_that_failed_ends_no_process() -> None:
    tick = read(replace(BLANK, processes=None), primed(processes={7: compute(7)}))
    assert [(one.process.pid, one.ended) for one in tick.usages] == [(7, False)]


@pytest.mark.parametrize(
    ("pid", "stamp_us", "percents", "reason"),
    [
        (0, START_US, (1, 1), "pid_zero"),
        (9, START_US, (1, 1), "not_listed"),
        (7, START_US, (101, 1), "implausible"),
        (7, START_US, (1, 101), "implausible"),
        (7, 2**63, (1, 1), "implausible"),
        (7, 2 * START_US, (1, 1), "implausible"),
    ],
)
def test_an_implausible_or_unassigned_sample_is_dropped_and_counted(
    pid: int, stamp_us: int, percents: tuple[int, int], reason: str
) -> None:
    sm_percent, memory_percent = percents
    sample = ProcessUtilizationSample(
        pid=pid, timestamp_us=stamp_us, sm_percent=sm_percent, memory_percent=memory_percent
    )
    answers = replace(
        BLANK, samples=samples(*[50] * 6), process_samples=(sample,), processes=(compute(7),)
    )
    tick = read(answers)
    assert usage(tick, 7).sm_ratio == 0.0
    assert dict(tick.dropped_samples) == {reason: 1}
    assert tick.last.last_seen.process_us == START_US


# Whether a GPU is without processes, so that its draw is its idle draw.

FREE = replace(
    BLANK,
    percent=0,
    processes=(),
    memory_total_bytes=80 << 30,
    memory_used_bytes=4 << 20,
    memory_reserved_bytes=600 << 20,
    power_milliwatts=70_000,
)
CUT = replace(
    FREE,
    percent=None,
    mig_enabled=True,
    activity={"profiling.graphics_engine_active_ratio": 0.0},
    memory_used_bytes=80 << 20,
    instances=tuple(RawGpuSample(uuid=f"MIG-{n}", index=0, processes=()) for n in range(2)),
)


def idle_draw(answers: RawGpuSample) -> int | None:
    gpu = GpuSampler()
    read(answers, gpu, seconds=10)
    return read(answers, gpu, seconds=10).reading.idle_draw_milliwatts


@pytest.mark.parametrize(
    ("law", "answers"),
    [
        ("no process is listed and no kernel ran", FREE),
        ("the memory in use includes an older driver's reserve", replace(
            FREE, memory_used_bytes=700 << 20, memory_reserved_bytes=None)),
        ("all instances are free and the chip's counters show no kernel", CUT),
    ],
)  # fmt: skip
def test_a_gpu_without_processes_is_free(law: str, answers: RawGpuSample) -> None:
    assert idle_draw(answers) == 70_000, law


@pytest.mark.parametrize(
    ("law", "answers"),
    [
        ("a process is listed", replace(FREE, processes=(compute(7),))),
        ("a list failed", replace(FREE, processes=None)),
        ("a kernel ran", replace(FREE, percent=1)),
        ("whether a kernel ran is not known", replace(FREE, percent=None)),
        ("the memory shows an unlisted process", replace(FREE, memory_used_bytes=101 << 20)),
        ("a process is in an instance", replace(CUT, instances=(
            CUT.instances[0], replace(CUT.instances[1], processes=(compute(7),))))),
        ("an instance's list failed", replace(CUT, instances=(
            CUT.instances[0], replace(CUT.instances[1], processes=None)))),
        ("the chip's counters are missing", replace(CUT, activity={})),
    ],
)  # fmt: skip
def test_a_gpu_that_may_have_processes_is_not_free(law: str, answers: RawGpuSample) -> None:
    assert idle_draw(answers) is None, law


def test_the_idle_draw_outlives_a_gap_and_a_new_driver() -> None:
    gpu = GpuSampler()
    for _ in range(2):
        read(FREE, gpu, seconds=10)
    gpu.forget()
    back = read(replace(FREE, processes=(compute(7),), energy_millijoules=5), gpu)
    assert back.reading.idle_draw_milliwatts == 70_000
