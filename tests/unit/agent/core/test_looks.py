"""Looks between ticks: when, and what is made of the answers."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpuledger.records import ProcessKind
from gpuledger_agent.core.looks import GpuLooks, Looked
from gpuledger_agent.core.node_looks import LookPlan, NodeLooks
from gpuledger_agent.core.normalize.gpu import GpuState
from gpuledger_agent.core.normalize.set_back import SetBack
from gpuledger_agent.core.raw import (
    ClockReading,
    GpuLook,
    ListedProcess,
    ProcessUtilizationSample,
    RawGpuSample,
    SampleCursor,
    UtilizationSample,
)
from gpuledger_agent.core.stamps import StampFilter

SECOND_NS = 1_000_000_000
WINDOW_US = 200_000
START_US = 1_000_000_000


def times(
    *, seconds: float = 1.0, lag: float = 0.0, pause: float = 0.1, is_close: bool = False
) -> list[tuple[float, str]]:
    """Return when is looked in a tick, in seconds, and at what."""
    plan = LookPlan(
        begin_ns=0,
        end_ns=round(seconds * SECOND_NS),
        lag_ns=round(lag * SECOND_NS),
        pause_ns=round(pause * SECOND_NS),
    )
    found, now_ns = [], 0
    while time := plan.next(now_ns, is_close=is_close):
        found.append((time.at_ns / SECOND_NS, time.others.value))
        now_ns = time.at_ns
    return found


@pytest.mark.parametrize(
    ("law", "plan", "expected"),
    [
        ("a tick asks itself", {}, []),
        ("energy is read when the cover ends", {"lag": 0.25}, [(0.75, "energy")]),
        ("also for a tick to come", {"lag": 1.5}, [(0.5, "energy")]),
        (
            "in a long tick all are asked each second",
            {"seconds": 3.0},
            [(1.0, "all"), (2.0, "all")],
        ),
        (
            "what is watched closely more often",
            {"pause": 0.4, "is_close": True, "lag": 0.25},
            [(0.4, "nothing"), (0.75, "energy"), (0.8, "nothing")],
        ),
        ("a pause as long as the tick means never", {"pause": 1.0, "is_close": True}, []),
        ("a look next to a tick would show nothing", {"lag": 0.99}, []),
    ],
)
def test_when_is_looked(law: str, plan: dict[str, Any], expected: list[tuple[float, str]]) -> None:
    assert times(**plan) == expected, law


def look(
    *percents: int,
    since: int = 0,
    uses: tuple[tuple[int, int, int], ...] = (),
    pids: tuple[int, ...] = (7,),
    latest: int | None = None,
    at: float = 1.0,
) -> GpuLook:
    """Return a look after `since` windows; `uses` are pid, window and percent."""
    at_ns = round(at * SECOND_NS)
    return GpuLook(
        uuid="GPU-0",
        at=ClockReading(time_ns=at_ns, monotonic_ns=at_ns, boottime_ns=at_ns),
        since_us=START_US + since * WINDOW_US,
        samples=tuple(
            UtilizationSample(timestamp_us=START_US + (since + place) * WINDOW_US, percent=percent)
            for place, percent in enumerate(percents, 1)
        ),
        process_samples=tuple(
            ProcessUtilizationSample(
                pid=pid,
                timestamp_us=START_US + window * WINDOW_US,
                sm_percent=percent,
                memory_percent=0,
            )
            for pid, window, percent in uses
        ),
        processes=tuple(
            ListedProcess(pid=pid, kind=ProcessKind.COMPUTE, memory_bytes=1) for pid in pids
        ),
        percent=latest,
    )


def join(looks: GpuLooks, own: GpuLook) -> Looked:
    raw = RawGpuSample(
        uuid="GPU-0",
        index=0,
        samples=own.samples,
        process_samples=own.process_samples,
        processes=own.processes,
    )
    return looks.join(raw, at=own.at, since_us=own.since_us, window_us=WINDOW_US)


def test_two_samples_of_a_process_in_one_answer_are_windows() -> None:
    looks = GpuLooks()
    looks.add(look(50, 50, 50, uses=((7, 1, 50), (7, 3, 50))), window_us=WINDOW_US)
    assert looks.one_sample_each is False


def test_one_sample_in_each_answer_of_several_windows_is_the_drivers_form() -> None:
    looks, shown = GpuLooks(), []
    for since in range(0, 24, 3):
        told = look(50, 50, 50, since=since, uses=((7, since + 3, 50),))
        looks.add(told, window_us=WINDOW_US)
        shown.append(looks.one_sample_each)
    assert shown == [None, None, *[True] * 6]


def test_a_process_that_rests_does_not_show_the_drivers_form() -> None:
    """It has one sample in each answer, too: of the only window in which anything ran."""
    looks = GpuLooks()
    for since in range(0, 120, 6):
        used = look(0, 0, 40, 0, 0, 0, since=since, uses=((7, since + 3, 40),))
        looks.add(used, window_us=WINDOW_US)
    assert looks.one_sample_each is None


def test_one_sample_of_several_windows_is_the_mean_of_them_and_of_one_window_its_own() -> None:
    looks = GpuLooks(one_sample_each=True)
    looks.add(look(50, 50, 50, uses=((7, 3, 50),)), window_us=WINDOW_US)
    told = join(looks, look(50, since=3, uses=((7, 4, 60),), at=1.2))
    assert [(one.since_us - START_US) // WINDOW_US for one in told.process_samples or ()] == [0, 3]


def test_a_tick_has_what_looks_were_told_each_window_once() -> None:
    looks = GpuLooks()
    looks.add(look(10, 20, uses=((7, 1, 10), (7, 2, 20))), window_us=WINDOW_US)
    told = join(looks, look(20, 30, since=1, uses=((7, 2, 20), (7, 3, 30)), at=1.5))
    assert [one.percent for one in told.samples or ()] == [10, 20, 30]
    assert [one.sm_percent for one in told.process_samples or ()] == [10, 20, 30]
    assert [one.at_ns for one in told.energy] == [SECOND_NS]


def test_the_next_question_begins_where_the_last_one_ended() -> None:
    looks, of_tick = GpuLooks(), SampleCursor(gpu_us=1, memory_us=1, process_us=1)
    assert looks.cursor(of_tick) == of_tick
    closed_us = START_US + 2.5 * WINDOW_US
    looks.add(look(10, 20, uses=((7, 1, 10),)), window_us=WINDOW_US, closed_us=closed_us)
    cursor = looks.cursor(of_tick)
    assert cursor.gpu_us == START_US + 2 * WINDOW_US
    # Where nothing was used, too: a mean from there on would be of the time before.
    assert cursor.process_us == closed_us


def test_who_came_and_went_between_two_ticks_was_there() -> None:
    looks = GpuLooks()
    looks.add(look(pids=(7,)), window_us=WINDOW_US)
    assert not looks.has_recent_changes(2 * SECOND_NS)
    looks.add(look(pids=(7, 8), at=2.0), window_us=WINDOW_US)
    assert looks.has_recent_changes(2 * SECOND_NS)
    looks.add(look(pids=(7,), at=2.5), window_us=WINDOW_US)
    told = join(looks, look(pids=(7,), at=3.0))
    assert told.processes.keys() == {7, 8}
    assert told.left_ns == {8: SECOND_NS * 5 // 2}
    assert not looks.has_recent_changes(14 * SECOND_NS)


def test_who_came_back_has_not_left() -> None:
    looks = GpuLooks()
    for at, pids in ((1.0, (7, 8)), (1.2, (7,)), (1.4, (7, 8))):
        looks.add(look(pids=pids, at=at), window_us=WINDOW_US)
    assert join(looks, look(pids=(7, 8), at=2.0)).left_ns == {}


def test_who_draws_and_computes_is_one_that_computes() -> None:
    told = look()
    both = tuple(
        ListedProcess(pid=7, kind=kind, memory_bytes=1)
        for kind in (ProcessKind.COMPUTE, ProcessKind.GRAPHICS)
    )
    looks = GpuLooks()
    looks.add(replace(told, processes=both), window_us=WINDOW_US)
    joined = join(looks, look(pids=(), at=2.0))
    assert joined.processes[7].kind is ProcessKind.COMPUTE


def test_a_driver_that_leaves_out_idle_windows_shows_by_its_latest_rates() -> None:
    looks = GpuLooks()
    newest_us = START_US + 2 * WINDOW_US
    told, later = look(10, 20, latest=0), look(latest=30)
    shown = []
    for answer, windows in ((told, 0.9), (told, 1.5), (later, 1.6)):
        closed_us = newest_us + windows * WINDOW_US
        looks.add(answer, window_us=WINDOW_US, closed_us=closed_us)
        shown.append(looks.skips_idle)
    assert shown == [False, True, False]


def test_a_look_that_failed_costs_what_that_gpu_told_alone() -> None:
    looks = NodeLooks(state_of=lambda _: GpuState(), set_back=SetBack())
    gpus = [RawGpuSample(uuid=uuid, index=index) for index, uuid in enumerate(("GPU-0", "GPU-1"))]
    looks.join(gpus, clocks(1.0))
    looks.record([GpuLook(uuid=gpu.uuid, at=clocks(1.5), power_milliwatts=7) for gpu in gpus])
    looks.record([GpuLook(uuid="GPU-0", at=clocks(1.7), failed=True)])
    told = looks.join(gpus, clocks(2.0))
    assert {uuid: len(looked.energy) for uuid, looked in told.items()} == {"GPU-0": 0, "GPU-1": 1}


def clocks(seconds: float, *, wall_us: int = 0) -> ClockReading:
    ns = round(seconds * SECOND_NS)
    return ClockReading(time_ns=wall_us * 1000, monotonic_ns=ns, boottime_ns=ns)


def kept(stamps: Sequence[int], filtered: StampFilter, at: ClockReading) -> list[int]:
    """Return which stamps are left of an answer's, of all three kinds."""
    utilization = tuple(UtilizationSample(timestamp_us=stamp, percent=1) for stamp in stamps)
    answer = GpuLook(
        uuid="GPU-0",
        at=at,
        samples=utilization,
        memory_samples=utilization,
        process_samples=tuple(
            ProcessUtilizationSample(pid=7, timestamp_us=stamp, sm_percent=1, memory_percent=1)
            for stamp in stamps
        ),
    )
    left = filtered.filter(answer, at)
    found = [
        [one.timestamp_us for one in told or ()]
        for told in (left.samples, left.memory_samples, left.process_samples)
    ]
    assert found[0] == found[1] == found[2]
    return found[0]


NOW_US = 10**15
MINUTE_US = 60_000_000


@pytest.mark.parametrize(
    ("law", "stamps", "expected"),
    [
        ("those of now are kept", [NOW_US - 5, NOW_US], [NOW_US - 5, NOW_US]),
        ("a minute ahead may be", [NOW_US + MINUTE_US], [NOW_US + MINUTE_US]),
        ("a bit more may not", [NOW_US, NOW_US + MINUTE_US + 1], [NOW_US]),
        ("not even alone", [NOW_US + MINUTE_US + 1], []),
        ("nor what no clock shows", [NOW_US, 2**63, 2**64 - 1], [NOW_US]),
        ("not even where several say it", [2**63, 2**63 + 1], []),
        ("stamps since boot are kept", [5, 500], [5, 500]),
        ("several that agree show another clock", [3 * NOW_US, 3 * NOW_US + 1], None),
    ],
)
def test_samples_that_are_stamped_too_far_ahead_are_left_out(
    law: str, stamps: list[int], expected: list[int] | None
) -> None:
    expected, filtered = stamps if expected is None else expected, StampFilter()
    assert kept(stamps, filtered, clocks(1.0, wall_us=NOW_US)) == expected, law
    dropped = len(stamps) - len(expected)
    assert set(filtered.drain_dropped().values()) <= {dropped}
    assert not filtered.drain_dropped()


def test_where_the_wall_clock_is_set_back_stamps_go_on_from_before() -> None:
    filtered = StampFilter()
    assert kept([NOW_US], filtered, clocks(1.0, wall_us=NOW_US))
    set_back = clocks(2.0, wall_us=NOW_US - 3600 * 10**6)
    later = NOW_US + 10**6
    assert kept([later, later + 2 * MINUTE_US], filtered, set_back) == [later]
    filtered.forget()
    assert kept([later], filtered, set_back) == []
