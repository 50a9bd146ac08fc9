"""Means and maxima over an interval agree with sums in exact fractions."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.ledger.families import (
    ACCOUNT,
    FAMILIES,
    POD,
    POD_INFO,
    REQUESTED,
    Family,
    OverInterval,
    SharedOfDevice,
)
from gpuledger.ledger.interval_values import IntervalValues, maxima_of
from gpuledger.ledger.series import EventSeries, SeriesGroup, SeriesValues
from gpuledger.records import Category
from tests.unit.sinks.builders import SECOND_NS, entry, event

_DEVICE: Final = next(
    family
    for family in FAMILIES
    if family.shares is None
    and any(one.over_interval is OverInterval.MEAN for one in family.metrics)
)
_GROUPS: Final = [
    SeriesGroup(_DEVICE, tuple(f"GPU-1 {label}" for label in _DEVICE.labels)),
    SeriesGroup(POD, ("GPU-1", "ns", "p", "uid", "c")),
    SeriesGroup(POD, ("GPU-1", "ns", "p", "uid", "d")),
    SeriesGroup(ACCOUNT, ("GPU-1", "idle", "", "", "", "", "")),
]
_Tick = tuple[int, Mapping[SeriesGroup, SeriesValues]]
"""The length of a tick in nanoseconds, and its values."""


@st.composite
def ticks(draw: st.DrawFn) -> _Tick:
    groups = draw(st.lists(st.sampled_from(_GROUPS), unique=True))
    values = {
        group: tuple(draw(st.none() | st.integers(-5, 1000)) for _ in group.family.metrics)
        for group in groups
    }
    return draw(st.sampled_from([1, 10**9, 3 * 10**9])), values


def over_interval(of: Sequence[_Tick]) -> dict[SeriesGroup, SeriesValues]:
    interval = IntervalValues()
    for interval_ns, values in of:
        interval.add(values, interval_ns=interval_ns)
    return interval.values()


def _had(of: Sequence[_Tick], group: SeriesGroup, metric: int) -> list[tuple[int, float]]:
    """Return each tick's length and value, for ticks that have a value."""
    found = []
    for interval_ns, values in of:
        value = values.get(group, ())[metric : metric + 1]
        found += [(interval_ns, one) for one in value if one is not None]
    return found


def _covered_ns(of: Sequence[_Tick], group: SeriesGroup, metric: int) -> int:
    """Return the length of the ticks in which at least one sharer of the device has a value."""
    if (shares := group.family.shares) is None:
        return sum(interval_ns for interval_ns, _ in _had(of, group, metric))
    sharing = [one for one in _GROUPS if one.family.shares is shares]
    return sum(
        interval_ns
        for interval_ns, values in of
        if any(_had([(interval_ns, values)], one, metric) for one in sharing)
    )


def _groups_in(of: Sequence[_Tick]) -> set[SeriesGroup]:
    """Return an interval's groups that have values; groups that only describe are left out."""
    return {group for _, values in of for group in values}


def _metrics(family: Family, how: OverInterval) -> list[int]:
    return [at for at, one in enumerate(family.metrics) if one.over_interval is how]


@given(st.lists(ticks(), min_size=1, max_size=6))
def test_a_mean_weights_each_tick_by_its_length(of: list[_Tick]) -> None:
    found = over_interval(of)

    for group in _groups_in(of):
        for metric in _metrics(group.family, OverInterval.MEAN):
            had, value = _had(of, group, metric), found[group][metric]
            if not had:
                assert value is None
                continue
            weighted = sum(Fraction(one) * interval_ns for interval_ns, one in had)
            assert value == pytest.approx(float(weighted / _covered_ns(of, group, metric)))


@given(st.lists(ticks(), min_size=1, max_size=6))
def test_a_maximum_is_taken_over_the_ticks_that_have_a_value(of: list[_Tick]) -> None:
    found = over_interval(of)

    for group in _groups_in(of):
        maxima = maxima_of(group.family)
        if not maxima.metrics:
            continue
        expected = [
            max((one for _, one in _had(of, group, metric)), default=None)
            for metric in _metrics(group.family, OverInterval.MEAN)
        ]
        assert list(found[SeriesGroup(maxima, group.label_values)]) == expected


@given(st.lists(ticks(), min_size=1, max_size=6))
def test_a_last_value_is_that_of_the_last_tick_that_has_one_and_a_sum_covers_all_ticks(
    of: list[_Tick],
) -> None:
    found = over_interval(of)

    for group in _groups_in(of):
        for metric in _metrics(group.family, OverInterval.LAST):
            had = _had(of, group, metric)
            assert found[group][metric] == (had[-1][1] if had else None)
        for metric in _metrics(group.family, OverInterval.SUM):
            had = _had(of, group, metric)
            assert found[group][metric] == (sum(one for _, one in had) if had else None)


@pytest.mark.parametrize("shares", SharedOfDevice)
def test_families_with_the_same_sharing_have_the_same_quantities_in_the_same_order(
    shares: SharedOfDevice,
) -> None:
    sharing = [family for family in FAMILIES if family.shares is shares]
    named = [[one.name.rpartition("_gpu_")[2] for one in family.metrics] for family in sharing]

    assert named
    assert all(names == named[0] for names in named)


_PARTS: Final = st.lists(
    st.tuples(
        st.sampled_from([Category.POD, Category.IDLE, Category.HOST, Category.UNATTRIBUTED]),
        st.integers(0, 100),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda part: part[0],
)
"""For a tick: the parts of the device and the category on which each is booked."""


@given(st.lists(_PARTS, min_size=1, max_size=6))
def test_the_means_of_all_entries_of_a_device_sum_to_the_device(
    of: list[list[tuple[Category, int]]],
) -> None:
    interval = IntervalValues()
    for parts in of:
        whole = sum(part for _, part in parts) or 1
        of_idle = whole - sum(part for _, part in parts)
        entries = [
            entry(
                category,
                busy_ns=SECOND_NS * part // whole,
                memory_bytes=part,
                energy_millijoules=1000 * part,
            )
            for category, part in parts
        ]
        entries[0] = replace(
            entries[0],
            busy_ns=SECOND_NS - sum(one.busy_ns or 0 for one in entries[1:]),
            memory_bytes=(entries[0].memory_bytes or 0) + of_idle,
        )
        interval.add(EventSeries().values_of(event(entries=entries)), interval_ns=SECOND_NS)
    found = {
        group: values
        for group, values in interval.values().items()
        if group.family in (POD, ACCOUNT)
    }

    busy, memory, power = (sum(v[at] or 0 for v in found.values()) for at in range(3))
    assert busy == pytest.approx(1)
    wholes = [sum(part for _, part in parts) for parts in of]
    assert memory == pytest.approx(sum(whole or 1 for whole in wholes) / len(of))
    assert power == pytest.approx(sum(wholes) / len(of))


def _info(uid: str, owner: str) -> SeriesGroup:
    return SeriesGroup(POD_INFO, ("ns", "p", uid, "Job", owner))


def _requested(name: str, uid: str) -> SeriesGroup:
    return SeriesGroup(REQUESTED, ("ns", name, uid, "main", "nvidia.com/gpu"))


@pytest.mark.parametrize(
    ("of", "described"),
    [
        ([[_info("a", "x")], []], [_info("a", "x")]),
        ([[_info("a", "")], [_info("a", "x")], []], [_info("a", "x")]),
        ([[_info("a", "x")], [_info("b", "x")]], [_info("a", "x"), _info("b", "x")]),
        ([[_requested("", "a")], [_requested("p", "a")]], [_requested("p", "a")]),
        (
            [[_requested("p", ""), _requested("q", "")], []],
            [_requested("p", ""), _requested("q", "")],
        ),
    ],
)
def test_each_object_of_an_interval_is_described_once_in_its_last_form(
    of: list[list[SeriesGroup]], described: list[SeriesGroup]
) -> None:
    ticks_of = [(SECOND_NS, dict.fromkeys(groups, (1.0,))) for groups in of]

    assert list(over_interval(ticks_of)) == described


@given(ticks(), st.integers(1, 4), st.lists(ticks(), max_size=2), st.floats(0.5, 2))
def test_the_fast_path_for_similar_ticks_gives_the_same_numbers(
    first: _Tick, times: int, then: list[_Tick], factor: float
) -> None:
    interval_ns, values = first
    alike = [
        (interval_ns, {group: _times(of_group, factor**tick) for group, of_group in values.items()})
        for tick in range(times)
    ]
    # The first tick has no values, so none of the others is similar to it.
    apart = [(0, {}), *alike, *then]

    assert over_interval([*alike, *then]) == over_interval(apart)


def _times(values: SeriesValues, factor: float) -> SeriesValues:
    return tuple(None if value is None else value * factor for value in values)


@given(ticks())
def test_a_tick_of_length_zero_reports_its_own_values(tick: _Tick) -> None:
    _, values = tick

    found = over_interval([(0, values)])

    assert {group: found[group] for group in values} == values
