"""Ticks become series: values, labels, repetitions, and the ends of series."""

import struct
from dataclasses import replace
from itertools import chain
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger.clock import NS_PER_MS
from gpuledger.ledger.families import FAMILIES, POD
from gpuledger.ledger.series import MAX_GROUPS, EventSeries, SentLabels, SeriesGroup
from gpuledger.ledger.usage import COUNTERS
from gpuledger.records import Category, GpuEvent, PodDescription, PodState
from gpuledger_sinks.remote_write.active_series import ActiveSeries, EncodedTick, series_budget
from gpuledger_sinks.remote_write.node_intervals import HealthOfNode, IntervalSamples
from gpuledger_sinks.remote_write.wire import Version, encode_request
from tests.unit.gpuledger.ledger.test_health import healthy, readings
from tests.unit.sinks.builders import (
    GPU,
    SECOND_NS,
    START_NS,
    books,
    entry,
    event,
    holder,
    pod,
    reading,
)
from tests.unit.sinks.remote_write.interval_samples import RECORD, samples_of
from tests.unit.sinks.remote_write.oracle import Series, parse, parse_v2

_T = TypeVar("_T")
STALE = 0x7FF0000000000002
TICK = "gpuledger_node_last_sample_timestamp_seconds"
PENDING = PodDescription(uid="uid-train", state=PodState.PENDING)


def encode(series: ActiveSeries, of: GpuEvent) -> list[Series]:
    encoded = series.encode(samples_of(of))
    parsed = parse_tick(encoded)
    assert encoded.samples == len(parsed)
    return parsed


def parse_tick(encoded: EncodedTick) -> list[Series]:
    return parse(encoded.encode(Version.V1))


def named(series: list[Series], name: str, **labels: str) -> Series:
    (found,) = [
        one
        for one in series
        if one.name == name and all(one.label(key) == value for key, value in labels.items())
    ]
    return found


def is_stale(series: Series) -> bool:
    return bool(struct.unpack("<Q", struct.pack("<d", series.value)) == (STALE,))


def stale_names(series: list[Series]) -> set[str]:
    return {one.name for one in series if is_stale(one)}


def test_device_readings_become_gauges_and_absent_ones_nothing() -> None:
    series = encode(ActiveSeries(), event())

    used = named(series, "gpuledger_gpu_memory_used_bytes")
    assert used == Series(
        (
            ("__name__", "gpuledger_gpu_memory_used_bytes"),
            ("cluster", "default"),
            ("gpu_index", "0"),
            ("gpu_uuid", GPU),
            ("model", "NVIDIA H100 80GB HBM3"),
            ("node", "node-a"),
        ),
        20 * 2**30,
        START_NS // 1_000_000,
    )
    assert not [one for one in series if one.name == "gpuledger_gpu_memory_clock_hertz"]


def test_entries_become_ratios_of_the_tick() -> None:
    booked = [entry(busy_ns=500_000_000, memory_bytes=10**9, energy_millijoules=700_000)]
    series = encode(ActiveSeries(), event(entries=booked, interval_ns=2 * SECOND_NS))

    busy = named(series, "gpuledger_pod_gpu_busy_ratio")
    assert dict(busy.labels) == {
        "__name__": "gpuledger_pod_gpu_busy_ratio",
        "cluster": "default",
        "node": "node-a",
        "gpu_uuid": GPU,
        "namespace": "research",
        "pod": "train-0",
        "pod_uid": "uid-train",
        "container": "trainer",
    }
    assert busy.value == 0.25
    assert named(series, "gpuledger_pod_gpu_memory_bytes").value == 1e9
    assert named(series, "gpuledger_pod_gpu_power_watts").value == 350.0


def test_usage_without_a_pod_has_its_own_series() -> None:
    booked = [entry(category) for category in Category]
    series = encode(ActiveSeries(), event(entries=booked))

    accounts = [
        one.label("category") for one in series if one.name == "gpuledger_category_gpu_busy_ratio"
    ]
    assert sorted(filter(None, accounts)) == ["host", "idle", "job", "unattributed"]


def test_used_and_unused_time_of_a_job_name_the_job() -> None:
    booked = [
        entry(Category.JOB, job_id="7"),
        entry(Category.IDLE, allocated_ns=10**9, job_id="7"),
    ]
    series = encode(ActiveSeries(), event(entries=booked, pods=[]))

    used, unused = (one for one in series if one.name == "gpuledger_category_gpu_busy_ratio")
    assert (used.label("category"), used.label("job_id")) == ("job", "7")
    assert (unused.label("category"), unused.label("allocated_job_id")) == ("idle", "7")
    assert named(series, "gpuledger_allocation_gpu_ratio").label("allocated_job_id") == "7"
    assert (used.label("allocated_job_id"), unused.label("job_id")) == (None, None)


def test_two_containers_without_names_are_summed_in_one_series() -> None:
    pending = PodDescription(uid="u", state=PodState.PENDING)
    booked = [entry(pod_uid="u", container_id=one, busy_ns=250_000_000) for one in ("a", "b")]

    series = encode(ActiveSeries(), event(entries=booked, pods=[pending]))

    assert named(series, "gpuledger_pod_gpu_busy_ratio").value == 0.5


def without(**gone: Any) -> dict[str, Any]:  # noqa: ANN401  # as GpuReading takes them
    return {"gpus": [books(reading(**gone), entry())]}


@pytest.mark.parametrize(
    ("then", "ended"),
    [
        (
            {"entries": [entry(Category.IDLE)]},
            {
                "gpuledger_pod_gpu_busy_ratio",
                "gpuledger_pod_gpu_memory_bytes",
                "gpuledger_pod_gpu_power_watts",
            },
        ),
        (without(power_milliwatts=None), {"gpuledger_gpu_power_watts"}),
        ({"entries": [entry()]}, set()),
    ],
)
def test_a_series_missing_from_the_next_tick_ends_at_that_tick(
    then: dict[str, Any], ended: set[str]
) -> None:
    series = ActiveSeries()
    encode(series, event(0, entries=[entry()]))

    second = encode(series, event(1, **then))
    third = encode(series, event(2, **then))

    assert stale_names(second) == ended
    assert {one.time_ms for one in second} == {(START_NS + SECOND_NS) // 1_000_000}
    assert stale_names(third) == set()


def test_a_pod_whose_name_becomes_known_ends_its_nameless_series_at_the_same_tick() -> None:
    series = ActiveSeries()
    encode(series, event(0, entries=[entry()], pods=[PENDING]))

    second = encode(series, event(1, entries=[entry()], pods=[pod()]))

    busy = [one for one in second if one.name == "gpuledger_pod_gpu_busy_ratio"]
    assert {(one.label("namespace"), is_stale(one)) for one in busy} == {
        (None, True),
        ("research", False),
    }


NAMED = PodDescription(
    uid="uid-train",
    state=PodState.NAMED,
    namespace="research",
    name="train-0",
)


@pytest.mark.parametrize("before", [PENDING, NAMED], ids=lambda each: each.state.value)
def test_sums_and_counters_do_not_change_while_a_pod_gets_its_name(before: PodDescription) -> None:
    """Earlier samples remain as sent; the UID is a label of both."""
    series, known = ActiveSeries(), pod()
    counters: list[tuple[Any, ...]] = []
    for tick, described in enumerate((before, before, known, known, before, known)):
        now = encode(
            series,
            event(
                tick,
                entries=[entry()],
                pods=[described],
                of=reading(energy_total_millijoules=1000 * tick),
            ),
        )
        alive = [one for one in now if not is_stale(one)]
        (busy,) = (one for one in alive if one.name == "gpuledger_pod_gpu_busy_ratio")
        assert (busy.value, busy.label("pod_uid")) == (0.5, "uid-train")
        # The nameless series ends in the tick that has the name, not one tick later.
        assert len(series) == len(alive)
        counters += [(one.labels, one.value) for one in now if one.name.endswith("_total")]

    # A counter belongs to the device: one series that continues whatever its pods are called.
    assert [value for _, value in counters] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert len({labels for labels, _ in counters}) == 1


def test_a_node_without_gpus_ends_all_its_series_and_those_of_no_other_node() -> None:
    series = ActiveSeries()
    alive = len(encode(series, event(0)))
    encode(series, event(0, node="node-b"))

    last = encode(series, event(1, gpus=[], pods=[]))

    assert len(last) == alive
    # The last tick of a node without GPUs is sent too.
    assert [one.name for one in last if not is_stale(one)] == [TICK]
    assert len(series) == alive + 1


def test_the_series_of_an_unresponsive_node_are_ended_once() -> None:
    series = ActiveSeries()
    first = series.encode(samples_of(event(0)), now_ns=100)
    series.encode(samples_of(event(0, node="node-b")), now_ns=200)

    (ended,) = series.end_silent(before_ns=200)

    assert ended.samples == first.samples
    assert {(one.label("node"), one.time_ms) for one in parse_tick(ended)} == {
        ("node-a", START_NS // 1_000_000 + 1)
    }
    assert all(is_stale(one) for one in parse_tick(ended))
    assert list(series.end_silent(before_ns=200)) == []
    again = series.encode(samples_of(event(1)), now_ns=300)
    assert again.samples == first.samples


@pytest.mark.parametrize("tick", [0, -1])
def test_a_tick_with_an_earlier_or_equal_time_continues_the_series(tick: int) -> None:
    """As after a clock was set back; it is marked because a receiver may reject it."""
    series = ActiveSeries()
    assert not series.encode(samples_of(event(0))).is_behind

    ended = series.encode(samples_of(event(tick, entries=[])))
    assert ended.is_behind
    assert stale_names(parse_tick(ended))
    assert not series.encode(samples_of(event(1))).is_behind


def test_a_tick_from_the_past_begins_and_ends_no_series() -> None:
    series = ActiveSeries()
    now = encode(series, event(9))

    past = series.encode(samples_of(event(0, entries=[entry(pod_uid="uid-gone")]), is_past=True))
    assert past.is_behind
    assert stale_names(parse_tick(past)) == set()
    assert {one.time_ms for one in parse_tick(past)} == {START_NS // 1_000_000}
    assert stale_names(encode(series, event(10))) == set()
    assert len(series) == len(now)


@given(st.lists(st.sets(st.integers(0, 4)), min_size=1, max_size=8))
def test_active_series_are_those_of_the_last_tick(ticks: list[set[int]]) -> None:
    series, alive = ActiveSeries(), set[tuple[tuple[str, str], ...]]()
    for number, pods in enumerate(ticks):
        booked = [entry(pod_uid=f"uid-{pod}", container_id=None) for pod in sorted(pods)]
        for one in encode(series, event(number, entries=booked)):
            if is_stale(one):
                alive.remove(one.labels)
            else:
                alive.add(one.labels)
        booked_on = {dict(labels).get("pod_uid") for labels in alive if "gpu_uuid" in dict(labels)}
        assert booked_on - {None} == {f"uid-{pod}" for pod in pods}
        assert len(series) == len(alive)


def test_no_series_appears_twice_in_a_tick() -> None:
    gpus = [
        books(
            reading(uuid=f"GPU-{number}", index=number),
            *(entry(), entry(), *map(entry, Category)),
            *(entry(Category.IDLE, allocation=holder) for holder in (0, 1)),
        )
        for number in range(3)
    ]
    series = encode(ActiveSeries(), event(gpus=gpus, allocated_to=[holder(), holder("chat-0")]))

    assert len({one.labels for one in series}) == len(series)


def test_every_metric_name_ends_with_its_base_unit() -> None:
    units = ("_ratio", "_bytes", "_watts", "_celsius", "_hertz", "_seconds", "_joules_total")
    # Gauges that count nothing, and those in a resource's own unit.
    without = ("_info", "_requested", "_up")
    named_metrics = [metric.name for family in FAMILIES for metric in family.metrics]

    assert [name for name in named_metrics if not name.endswith((*units, *without))] == []
    assert len(set(named_metrics)) == len(named_metrics)


@pytest.mark.parametrize("chosen", [(), ("team",)])
def test_descriptions_of_pods_take_memory_only_if_their_labels_are_sent(
    chosen: tuple[str, ...],
) -> None:
    made, held_bytes = EventSeries(SentLabels(pods=chosen)), list[int]()
    for length in (1, 10_000):
        budget = series_budget()
        described = event(pods=[pod(labels={"team": "x" * length})])
        samples = replace(samples_of(described), values=made.values_of(described))
        ActiveSeries(budget=budget).encode(samples)
        held_bytes.append(budget.held_bytes)

    assert (held_bytes[1] - held_bytes[0] > 10_000) == bool(chosen)


def health(*seconds: int, is_past: bool = False) -> list[IntervalSamples]:
    """Return the samples of a GPU's health, read at these times."""
    node, record = HealthOfNode("default/node-a", every_ns=10 * SECOND_NS), RECORD
    reported = (node.add(readings(at, healthy()), record, is_past=is_past) for at in seconds)
    return list(chain.from_iterable(reported))


def test_a_node_with_only_readings_takes_memory_and_frees_it() -> None:
    budget = series_budget()
    series = ActiveSeries(budget=budget)
    (reported,) = health(*range(11))

    assert series.encode(reported, now_ns=10).samples == 1
    assert budget.held_bytes > 0
    (ended,) = series.end_silent(before_ns=100)
    assert [is_stale(one) for one in parse_tick(ended)] == [True]
    assert budget.held_bytes == 0


def test_health_of_an_earlier_boot_is_not_sent() -> None:
    assert health(0, 20, is_past=True) == []


def test_combined_parts_are_one_request() -> None:
    series = ActiveSeries()
    ticks = [series.encode(samples_of(event(0, node=node))) for node in ("node-a", "node-b")]
    timed = [timed for tick in ticks for timed in tick.timed]

    first = parse(encode_request(Version.V1, timed))
    second = [one.series for one in parse_v2(encode_request(Version.V2, timed))]
    assert {one.label("node") for one in first} == {"node-a", "node-b"}
    assert first == second


def test_series_of_one_time_nodes_take_bounded_memory_and_active_ones_are_kept() -> None:
    """Partitions share the budget."""
    budget = series_budget(100_000)
    here, there = ActiveSeries(budget=budget), ActiveSeries(budget=budget)
    encode(here, event(node="node-a"))

    for number in range(300):
        here.encode(samples_of(event(node=f"made-up-{number}")))
        there.encode(samples_of(event(node=f"others-{number}")))
        here.encode(samples_of(event(number + 1, node="node-a", entries=[entry(Category.HOST)])))
        assert budget.held_bytes <= 2 * budget.max_bytes

    ended = here.encode(samples_of(event(400, node="node-a", entries=[])))
    assert stale_names(parse_tick(ended))
    assert here.forgotten > 0
    for series in (here, there):
        series.clear()
    assert budget.held_bytes == 0


def test_the_memory_of_ended_series_is_freed() -> None:
    budget = series_budget()
    series = ActiveSeries(budget=budget)
    series.encode(samples_of(event(node="node-a")), now_ns=1)

    list(series.end_silent(before_ns=2))

    assert (len(series), budget.held_bytes) == (0, 0)


def test_a_tick_with_more_groups_than_the_maximum_is_rejected() -> None:
    """A few bytes of a record would become a hundred times as many in labels."""
    entries = [entry(Category.HOST), entry(Category.IDLE)]
    gpus = [books(reading(uuid=f"GPU-{number}"), *entries) for number in range(MAX_GROUPS // 4 + 1)]

    with pytest.raises(ValueError, match=f"more than {MAX_GROUPS}"):
        ActiveSeries().encode(samples_of(event(gpus=gpus)))


_GROUPS: Final = [
    SeriesGroup(COUNTERS, ("GPU-1", "idle", "", "", "", "", "")),
    SeriesGroup(COUNTERS, ("GPU-1", "pod", "ns", "p", "uid", "c", "")),
    SeriesGroup(COUNTERS, ("GPU-1", "job", "", "", "", "", "7")),
    SeriesGroup(POD, ("GPU-1", "ns", "p", "uid", "c")),
]


class _OfGroup(NamedTuple):
    """The metrics for which a tick has a value in a group, and their starts, if known."""

    group: SeriesGroup
    has_value: list[bool]
    starts_ms: list[int | None]


@st.composite
def _groups_of_tick(draw: st.DrawFn) -> list[_OfGroup]:
    def lists_for(group: SeriesGroup, of: st.SearchStrategy[_T]) -> list[_T]:
        metrics = len(group.family.metrics)
        return draw(st.lists(of, min_size=metrics, max_size=metrics))

    chosen = draw(st.lists(st.sampled_from(_GROUPS), unique=True, min_size=1))
    starts = st.sampled_from([None, START_NS // NS_PER_MS, START_NS // NS_PER_MS - 1])
    return [_OfGroup(one, lists_for(one, st.booleans()), lists_for(one, starts)) for one in chosen]


def _as_samples(tick: int, groups: list[_OfGroup]) -> IntervalSamples:
    return IntervalSamples(
        node="default/node-a",
        time_ns=START_NS + tick * SECOND_NS,
        values={
            one.group: tuple(tick + at if has else None for at, has in enumerate(one.has_value))
            for one in groups
        },
        starts_ms={one.group: one.starts_ms for one in groups if one.group.family is COUNTERS},
        record=RECORD,
    )


@given(st.lists(_groups_of_tick(), min_size=1, max_size=3), st.lists(st.integers(0, 2), min_size=1))
def test_a_tick_is_sent_the_same_whatever_ticks_came_before(
    kinds: list[list[_OfGroup]], order: list[int]
) -> None:
    series = ActiveSeries()
    # Each tick twice, with other kinds in between.
    for tick, kind in enumerate(chain.from_iterable((n, n) for n in order)):
        samples = _as_samples(tick, kinds[kind % len(kinds)])
        sent = parse_v2(series.encode(samples).encode(Version.V2))
        alone = parse_v2(ActiveSeries().encode(samples).encode(Version.V2))
        assert [one for one in sent if not is_stale(one.series)] == alone
