"""Sinks forget nodes after a day, by one rule, whatever the names of the nodes are."""

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from gpuledger.recent import Recent
from gpuledger.records import Category, GpuEvent
from gpuledger_sinks.alerts.active_alerts import Now
from gpuledger_sinks.alerts.partition_alerts import PartitionAlerts
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.timelines import SeenTicks, Timelines
from tests.unit.sinks.builders import START_NS, ManualClock, entry, event, place_of
from tests.unit.sinks.remote_write.interval_samples import samples_of

DAY = 86_400
Take = Callable[[GpuEvent], object]


def kept_of(days: dict[str, int], *, queried_on_day: int) -> set[str]:
    """Return which keys, each last used on a given day, are remembered on another day."""
    recent: Recent[str, int] = Recent()
    for day in range(queried_on_day + 1):
        recent.go_on(day * DAY * 10**9)
        for key, until in days.items():
            if day == 0:
                recent[key] = until
            elif day <= until:
                recent.get(key)
    return {key for key, _ in recent.items()}


def test_keys_used_today_or_yesterday_are_remembered() -> None:
    days = {f"until day {day}": day for day in range(6)}
    assert kept_of(days, queried_on_day=5) == {"until day 4", "until day 5"}


def test_a_removed_key_is_removed_from_both_days() -> None:
    recent: Recent[str, int] = Recent()
    recent.go_on(0)
    recent["a"], recent["b"], recent["c"] = 1, 2, 3
    recent.go_on(DAY * 10**9)
    recent["c"] = 4
    del recent["a"]
    assert recent.pop("b") == 2
    assert (list(recent.items()), len(recent), recent.get("a")) == ([("c", 4)], 1, None)


def watching(clock: ManualClock) -> Take:
    watch = PartitionAlerts()

    def take(of: GpuEvent) -> None:
        watch.observe(of, now=Now.of(clock))
        watch.forget(now=Now.of(clock))

    return take


def sending(clock: ManualClock) -> Take:
    series = ActiveSeries()

    def take(of: GpuEvent) -> None:
        series.encode(samples_of(of), now_ns=clock.monotonic_ns())
        for _ in series.end_silent(before_ns=clock.monotonic_ns() - 300 * 10**9):
            pass

    return take


def sending_what_is_past(clock: ManualClock) -> Take:
    series = ActiveSeries()
    return lambda of: series.encode(samples_of(of, is_past=True), now_ns=clock.monotonic_ns())


def placing(clock: ManualClock) -> Take:
    timelines = Timelines()
    return lambda of: timelines.observe(of, received_ns=clock.monotonic_ns())


def recognising(clock: ManualClock) -> Take:
    seen = SeenTicks(clock=clock)
    return lambda of: seen.is_new(place_of("node-a"), of)


@pytest.mark.parametrize(
    "remembering",
    [watching, sending, sending_what_is_past, placing, recognising],
    ids=lambda one: one.__name__,
)
def test_memory_does_not_grow_with_the_names_of_nodes_that_come_and_go(
    remembering: Callable[[ManualClock], Take],
) -> None:
    clock = ManualClock(START_NS)
    take, used = remembering(clock), list[int]()
    tracemalloc.start()
    try:
        for day in range(18):
            for number in range(200):
                clock.advance(DAY / 200)
                take(event(node=f"node-{day}-{number}", entries=[entry(Category.HOST)]))
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    # By then the caches of names, whose size does not depend on the number of nodes, are full.
    assert max(used[12:]) < 1.2 * max(used[6:9])


def test_one_time_names_take_bounded_memory_and_names_in_use_stay() -> None:
    recent: Recent[str, int] = Recent(max_a_day=100)
    recent["node"] = 1
    for number in range(10_000):
        recent[f"made-up-{number}"] = number
        if number % 50 == 0:
            assert recent.get("node") == 1
        assert len(recent) <= 200
