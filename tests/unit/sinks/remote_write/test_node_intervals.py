"""The samples of a node's ticks: intervals of event time, and counters that lose nothing."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.bus.protocol import Record
from gpuledger.codec import decoder_of, encode, validate
from gpuledger.keys import node_key
from gpuledger.ledger.entries import gpu_units_of
from gpuledger.ledger.families import ACCOUNT, DEVICE, POD, POD_INFO
from gpuledger.ledger.interval_values import maxima_of
from gpuledger.ledger.series import EventSeries, SeriesGroup
from gpuledger.ledger.usage import COUNTED, COUNTERS, SETTLED, UNUSED, UNUSED_ENERGY, CountedLabels
from gpuledger.records import Category, GpuEvent, NodeCounters, PodDescription, PodState
from gpuledger_sinks.remote_write.node_counters import KEPT_NS, WAITS_NS
from gpuledger_sinks.remote_write.node_intervals import IntervalSamples, NodeIntervals
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    books,
    entry,
    event,
    holder,
    pod,
    reading,
    settlement,
)
from tests.unit.sinks.events import events

INTERVAL_NS = 5 * SECOND_NS
NODE_KEY = node_key(event())
TIMES = {"busy_ns": "busy_units", "allocated_ns": "allocated_units"}
"""The names of times as counted: in units of a physical GPU's nanosecond."""


def record_at(offset: int) -> Record:
    return Record("events", 0, offset, 0, None, None)


class Played:
    """A node whose ticks are counted by sinks that may be killed; each resumes at the commit."""

    def __init__(
        self,
        ticks: Sequence[GpuEvent],
        *,
        interval_ns: int = INTERVAL_NS,
    ) -> None:
        self._ticks, self._interval_ns = ticks, interval_ns
        self._values = EventSeries()
        self.sent: list[IntervalSamples] = []
        self._restart(None, 0)

    def _restart(self, counted: NodeCounters | None, offset: int) -> None:
        self.intervals = NodeIntervals(
            NODE_KEY, values=self._values, interval_ns=self._interval_ns, counted=counted
        )
        self._committed, self._offset = (counted, offset), offset

    def play(self, *, until: int, commits: bool = True) -> None:
        """Process the ticks up to an offset as the sink does, and skip counted ones."""
        for offset in range(self._offset, until):
            tick = self._ticks[offset]
            if tick.seq > self.intervals.boots.get(tick.boot_id, -1):
                self._send(self.intervals.add(tick, record_at(offset), is_past=False))
        self._offset = max(self._offset, until)
        if commits:
            first = self.intervals.first_offset
            record = self.intervals.take_record("group")
            validate(record)
            decoded = decoder_of("counters", NodeCounters).decode(encode(record))
            self._committed = (decoded, self._offset if first is None else first)

    def kill(self) -> None:
        """Restart from the last commit."""
        self._restart(*self._committed)

    def finish(self) -> None:
        self.play(until=len(self._ticks))
        self._send(self.intervals.close())

    def _send(self, samples: Iterable[IntervalSamples]) -> None:
        # Incident counters are sent at their own interval.
        self.sent += [one for one in samples if not one.is_of_incidents]


def counters(samples: IntervalSamples) -> dict[SeriesGroup, tuple[float | None, ...]]:
    return {group: values for group, values in samples.values.items() if group.family is COUNTERS}


def drawn_ticks() -> st.SearchStrategy[list[GpuEvent]]:
    """Draw ticks in their order, at most ten seconds apart."""

    def in_order(drawn: Iterable[tuple[GpuEvent, int]]) -> list[GpuEvent]:
        found, time_ns = list[GpuEvent](), START_NS
        for number, (one, step_ms) in enumerate(drawn):
            time_ns += step_ms * 10**6
            found.append(
                replaced(one, time_ns=time_ns, seq=1000 + number, interval_ns=step_ms * 10**6)
            )
        return found

    steps = st.tuples(events(), st.integers(1, 10_000))
    return st.lists(steps, min_size=1, max_size=8).map(in_order)


def replaced(one: GpuEvent, **changes: Any) -> GpuEvent:  # noqa: ANN401  # any field
    fields: dict[str, Any] = {name: getattr(one, name) for name in one.__struct_fields__}
    return GpuEvent(**fields | changes)


def booked(ticks: Iterable[GpuEvent]) -> dict[tuple[str, str], int]:
    """Return the sums of the entries of each device, as whole numbers like the counters."""
    sums: defaultdict[tuple[str, str], int] = defaultdict(int)
    for tick in ticks:
        for of_gpu in tick.gpus:
            uuid, units = of_gpu.reading.uuid, gpu_units_of(of_gpu) or 0
            for one in of_gpu.entries:
                for name, as_counted in TIMES.items():
                    sums[uuid, as_counted] += max(getattr(one, name) or 0, 0) * units
                is_allocated = one.allocated_ns is not None and (
                    one.allocation is not None or one.job_id is not None
                )
                if one.category is Category.IDLE and is_allocated:
                    sums[uuid, UNUSED] += max(one.busy_ns or 0, 0) * units
                    sums[uuid, UNUSED_ENERGY] += one.energy_millijoules or 0
                sums[uuid, "energy_millijoules"] += one.energy_millijoules or 0
                sums[uuid, "memory_bytes"] += (one.memory_bytes or 0) * tick.interval_ns
        for settled in tick.late_adjustments or ():
            of_gpu = tick.gpus[settled.gpu]
            uuid, units = of_gpu.reading.uuid, gpu_units_of(of_gpu) or 0
            for one in settled.entries:
                name = "busy_units" if (one.busy_ns or 0) >= 0 else SETTLED
                sums[uuid, name] += abs(one.busy_ns or 0) * units
    return {key: total for key, total in sums.items() if total}


def counted(record: NodeCounters) -> dict[tuple[str, str], int]:
    """Return the sums of each device's counters, including usage that waits for names."""
    sums: Counter[tuple[str, str]] = Counter()
    for one in [*record.series, *(record.waiting or ())]:
        for name, amount in zip(record.quantities, one.amounts, strict=True):
            sums[record.gpus[one.gpu], name] += int(amount or 0)
    return {key: total for key, total in sums.items() if total}


@given(ticks=drawn_ticks(), interval_ns=st.sampled_from([0, SECOND_NS, INTERVAL_NS]))
def test_the_counters_of_a_device_equal_the_sum_of_its_entries_exactly(
    ticks: list[GpuEvent], interval_ns: int
) -> None:
    played = Played(ticks, interval_ns=interval_ns)
    played.finish()
    assert counted(played.intervals.take_record("group")) == booked(ticks)


@given(ticks=drawn_ticks(), data=st.data(), interval_ns=st.sampled_from([0, INTERVAL_NS]))
def test_samples_repeated_after_a_crash_equal_those_before_it(
    ticks: list[GpuEvent], data: st.DataObject, interval_ns: int
) -> None:
    """Whatever was committed, and wherever the sink was killed."""
    undisturbed, killed = (
        Played(ticks, interval_ns=interval_ns),
        Played(ticks, interval_ns=interval_ns),
    )
    undisturbed.finish()
    steps = st.lists(st.tuples(st.integers(0, len(ticks)), st.booleans(), st.booleans()))
    for until, commits, dies in data.draw(steps):
        killed.play(until=until, commits=commits)
        if dies:
            killed.kill()
    killed.finish()
    for samples in killed.sent:
        (same,) = [one for one in undisturbed.sent if one.time_ns == samples.time_ns]
        assert samples == same
    assert {one.time_ns for one in killed.sent} == {one.time_ns for one in undisturbed.sent}
    records = [each.intervals.take_record("group") for each in (killed, undisturbed)]
    assert records[0] == records[1]


@given(ticks=drawn_ticks())
def test_no_counter_falls_and_each_starts_with_a_zero_before_its_first_value(
    ticks: list[GpuEvent],
) -> None:
    played = Played(ticks)
    played.finish()
    before: dict[tuple[SeriesGroup, int], float] = {}
    for samples in played.sent:
        for group, values in counters(samples).items():
            for number, value in enumerate(values):
                if value is None:
                    continue
                is_begun = number in samples.begun.get(group, ())
                assert is_begun == ((group, number) not in before)
                start_ms = samples.starts_ms[group][number]
                assert start_ms is not None
                assert start_ms <= samples.time_ns // 10**6 + 1
                assert value >= before.get((group, number), 0)
                before[group, number] = value


@given(ticks=drawn_ticks(), cuts=st.lists(st.integers(0, 8)))
def test_samples_do_not_depend_on_how_ticks_were_polled(
    ticks: list[GpuEvent], cuts: list[int]
) -> None:
    at_once, in_parts = Played(ticks), Played(ticks)
    at_once.finish()
    for cut in sorted(cuts):
        in_parts.play(until=min(cut, len(ticks)))
    in_parts.finish()
    assert at_once.sent == in_parts.sent


def play(*ticks: GpuEvent, interval_ns: int = INTERVAL_NS) -> list[IntervalSamples]:
    played = Played(ticks, interval_ns=interval_ns)
    played.finish()
    return played.sent


def test_an_interval_ends_with_the_first_tick_of_the_next_and_has_the_time_of_its_last() -> None:
    first = play(*map(event, range(12)))
    assert [one.time_ns % INTERVAL_NS for one in first[:-1]] == [0] * (len(first) - 1)
    assert [one.time_ns for one in first] == sorted({one.time_ns for one in first})
    assert first[-1].time_ns == event(11).time_ns


def test_without_a_length_each_tick_is_sent() -> None:
    sent = play(*map(event, range(3)), interval_ns=0)
    assert [one.time_ns for one in sent] == [event(tick).time_ns for tick in range(3)]
    families = {group.family for one in sent for group in one.values}
    assert {maxima_of(family) for family in families}.isdisjoint(families)


def test_a_node_whose_clock_is_set_back_does_not_wait() -> None:
    ahead = event(0, time_ns=START_NS + 3600 * SECOND_NS, seq=1)
    back = [event(tick, seq=10 + tick) for tick in range(6)]
    sent = play(ahead, *back)
    assert sent[0].time_ns == ahead.time_ns
    assert sent[-1].time_ns == back[-1].time_ns


def busy_mean(samples: IntervalSamples) -> dict[str, float]:
    """Return the mean share of the GPU of each category and container."""
    found = {}
    for group, values in samples.values.items():
        if group.family in (POD, ACCOUNT) and values[0] is not None:
            found["/".join(group.label_values[1:])] = values[0]
    return found


@given(ticks=drawn_ticks())
def test_the_means_of_the_users_of_a_device_sum_to_its_mean(ticks: list[GpuEvent]) -> None:
    for samples in play(*ticks):
        of_interval = [t for t in ticks if interval_of(t.time_ns) == interval_of(samples.time_ns)]
        for uuid in {of_gpu.reading.uuid for tick in of_interval for of_gpu in tick.gpus}:
            known = [
                (one.busy_ns, tick.interval_ns, id(tick))
                for tick in of_interval
                for of_gpu in tick.gpus
                if of_gpu.reading.uuid == uuid
                for one in of_gpu.entries
                if one.busy_ns is not None
            ]
            means = [
                values[0]
                for group, values in samples.values.items()
                if group.family in (POD, ACCOUNT)
                and group.label_values[0] == uuid
                and values[0] is not None
            ]
            covered_ns = sum({tick: interval for _, interval, tick in known}.values())
            # Values below zero are in no tick's books, and would cancel all digits of the others.
            if covered_ns and all(busy >= 0 for busy, *_ in known):
                assert sum(means) == pytest.approx(sum(busy for busy, *_ in known) / covered_ns)


def interval_of(time_ns: int) -> int:
    return -(-time_ns // INTERVAL_NS)


def test_a_device_is_averaged_over_ticks_with_a_value_and_has_its_maximum() -> None:
    watts = [100_000, 300_000, None, 200_000, 200_000]
    ticks = [event(tick + 1, of=reading(power_milliwatts=each)) for tick, each in enumerate(watts)]
    (samples,) = play(*ticks)
    names = [metric.name for metric in DEVICE.metrics]
    (mean,) = [values for group, values in samples.values.items() if group.family is DEVICE]
    assert mean[names.index("gpuledger_gpu_power_watts")] == 200.0
    maxima = maxima_of(DEVICE)
    names = [metric.name for metric in maxima.metrics]
    (most,) = [values for group, values in samples.values.items() if group.family is maxima]
    assert most[names.index("gpuledger_gpu_power_max_watts")] == 300.0


def test_a_pod_whose_names_arrive_within_an_interval_is_described_once() -> None:
    (samples,) = play(pending(1), event(2, entries=[entry()]))
    described = [group.label_values for group in samples.values if group.family is POD_INFO]
    assert described == [("research", "train-0", "uid-train", "StatefulSet", "train")]


def pod_counters(samples: IntervalSamples) -> Mapping[tuple[str, ...], float | None]:
    """Return the busy seconds of pods by namespace, pod, UID and container."""
    busy = COUNTED.index("busy_units")
    return {
        group.label_values[2:6]: values[busy]
        for group, values in counters(samples).items()
        if group.label_values[1] == "pod"
    }


TRAINER = ("research", "train-0", "uid-train", "trainer")


def pending(tick: int) -> GpuEvent:
    return event(
        tick, entries=[entry()], pods=[PodDescription(uid="uid-train", state=PodState.PENDING)]
    )


def test_usage_waits_for_names_and_is_counted_under_them() -> None:
    sent = play(pending(1), pending(2), *(event(tick, entries=[entry()]) for tick in (6, 7)))
    assert [dict(pod_counters(one)) for one in sent] == [{}, {TRAINER: 2.0}]
    (group,) = sent[1].begun
    start_ms = (event(1).time_ns - SECOND_NS) // 10**6 + 1
    assert sent[1].starts_ms[group][COUNTED.index("busy_units")] == start_ms


def test_usage_whose_names_never_arrive_is_counted_under_the_known_labels() -> None:
    ticks = [pending(tick) for tick in range(1, WAITS_NS // SECOND_NS + 12)]
    last = play(*ticks)[-1]
    assert dict(pod_counters(last)) == {("", "", "uid-train", ""): len(ticks) / 2}


def test_a_series_continues_while_its_container_is_absent_and_ends_after_a_while() -> None:
    kept = KEPT_NS // SECOND_NS
    away = [event(tick, entries=[entry(Category.IDLE)]) for tick in range(6, kept + 20)]
    sent = play(event(1), *away)
    seconds = [pod_counters(one).get(TRAINER) for one in sent]
    assert seconds[:3] == [0.5] * 3
    assert seconds[-1] is None
    back = play(event(1), *away, event(kept + 21))[-1]
    assert pod_counters(back)[TRAINER] == 0.5
    assert CountedLabels("GPU-a", "pod", *TRAINER).group in back.begun or back.begun


def test_late_usage_counts_in_the_newest_interval() -> None:
    intervals = NodeIntervals(NODE_KEY, values=EventSeries(), interval_ns=INTERVAL_NS)
    sent = list(intervals.add(event(1), record_at(0), is_past=False))
    old = event(-500, boot_id="boot-0")
    sent += intervals.add(old, record_at(1), is_past=True)
    sent += intervals.add(event(6), record_at(2), is_past=False)
    (samples,) = sent
    assert samples.time_ns == event(1).time_ns
    assert pod_counters(samples)[TRAINER] == 1.0
    assert busy_mean(samples)


def test_late_adjustments_are_counted_separately_from_unattributed_usage() -> None:
    nobody = entry(Category.UNATTRIBUTED, busy_ns=SECOND_NS)
    ticks = [
        event(1, entries=[nobody]),
        event(2, entries=[nobody], late_adjustments=[settlement(SECOND_NS // 4)]),
    ]
    (samples,) = play(*ticks)
    found = {group.label_values[1]: values for group, values in counters(samples).items()}
    busy, settled = COUNTED.index("busy_units"), COUNTED.index(SETTLED)
    assert found["unattributed"][busy] == 2.0
    assert found["unattributed"][settled] == 0.25
    assert found["pod"][busy] == 0.25


def test_allocated_time_is_counted_for_its_allocatee_or_as_unallocated() -> None:
    idle = [
        entry(Category.IDLE, busy_ns=SECOND_NS, allocation=0, allocated_ns=SECOND_NS // 4),
        entry(Category.IDLE, busy_ns=0, allocated_ns=3 * SECOND_NS // 4),
    ]
    (samples,) = play(event(1, entries=idle, allocated_to=[holder()], pods=[]))
    allocated = COUNTED.index("allocated_units")
    found = {
        group.label_values[1:4]: values[allocated] for group, values in counters(samples).items()
    }
    assert found == {("pod", "research", "notebook-0"): 0.25, ("idle", "", ""): 0.75}


def test_a_record_that_points_beyond_its_lists_is_rejected() -> None:
    played = Played([event(1)])
    played.finish()
    record = played.intervals.take_record("group")
    fields: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    with pytest.raises(ValueError, match="position"):
        NodeIntervals(
            NODE_KEY,
            values=EventSeries(),
            interval_ns=0,
            counted=NodeCounters(**fields | {"gpus": []}),
        )


def test_an_event_that_points_to_an_unlisted_allocation_is_rejected_and_not_counted() -> None:
    intervals = NodeIntervals(NODE_KEY, values=EventSeries(), interval_ns=INTERVAL_NS)
    broken = event(1, gpus=[books(reading(), entry(Category.IDLE, allocation=7))])
    with pytest.raises(ValueError, match="allocation"):
        list(intervals.add(broken, record_at(0), is_past=False))
    assert intervals.first_offset is None
    assert pod().name == "train-0"


def test_usage_before_names_that_arrive_in_the_same_interval_is_counted_under_them() -> None:
    unnamed = PodDescription(uid="uid-train", state=PodState.PENDING)
    over: dict[str, Any] = {"entries": [entry(Category.IDLE)], "pods": []}
    ticks = [
        event(1, pods=[unnamed]),
        event(2),
        event(3),
        *(event(tick, **over) for tick in range(4, 80)),
    ]
    found = {
        group.label_values[2:6]: values[0]
        for samples in play(*ticks)
        for group, values in counters(samples).items()
        if group.label_values[1] == Category.POD
    }
    assert found == {("research", "train-0", "uid-train", "trainer"): 1.5}
