"""The values of series over an interval of several ticks: means and maxima of what ticks read.

A tick counts by its length. What is measured of a device as a whole is averaged over the ticks that
have a value of it. What is booked on those who share a device is averaged over all ticks in which
anybody has a value: who is not there in a tick had nothing of it, so that the means of those who
share a device sum to the device's mean, as in each tick. Pure.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from gpuledger.ledger.families import Family, FamilyMetric, OverInterval
from gpuledger.ledger.series import SeriesGroup, SeriesValues

_Key = tuple[Family, str]


def maximum_name(name: str) -> str:
    """Return what the maximum of a metric is called: its name, with `max` before its unit."""
    stem, unit = name.rsplit("_", 1)
    return f"{stem}_max_{unit}"


@cache
def maxima_of(family: Family) -> Family:
    """Return the family of the maxima of a family's means; it may have no metric."""
    means = () if family.is_alias else filter(_is_mean, family.metrics)
    return Family(
        labels=family.labels,
        metrics=tuple(
            FamilyMetric(
                name=maximum_name(metric.name),
                help=f"The greatest value of a tick of the interval of {metric.name}.",
            )
            for metric in means
        ),
    )


@cache
def _is_of_the_last(family: Family) -> bool:
    return family.is_alias or all(
        metric.over_interval is OverInterval.LAST for metric in family.metrics
    )


def _is_mean(metric: FamilyMetric) -> bool:
    return metric.over_interval is OverInterval.MEAN


class _MetricTotals(NamedTuple):
    """What the ticks of an interval said of one metric."""

    weighted: float
    """The sum of its values times the lengths of their ticks, in nanoseconds."""
    total: float
    """The sum of its values."""
    maximum: float
    last: float
    covered_ns: float
    """The length of the ticks that had a value; exact for a hundred days."""


_FIELDS: Final = len(_MetricTotals._fields)


class _Totals:
    """The same of all metrics of one group, in one array: each node has a hundred of them."""

    __slots__ = ("_has", "_numbers", "tick")

    def __init__(self, metrics: int) -> None:
        self._numbers = array("d", bytes(8 * _FIELDS * metrics))
        self._has = 0
        """Bit n is set where metric n has had a value."""
        self.tick = 0
        """The number of the last tick that had the group."""

    def add(self, values: SeriesValues, interval_ns: int) -> int:
        """Add the values of a tick; return, as bits, which metrics had one."""
        bits, bit, at = 0, 1, 0
        numbers, has = self._numbers, self._has
        for value in values:
            if value is not None:
                bits |= bit
                numbers[at] += value * interval_ns
                numbers[at + 1] += value
                if not has & bit or value > numbers[at + 2]:
                    numbers[at + 2] = value
                numbers[at + 3] = value
                numbers[at + 4] += interval_ns
            bit <<= 1
            at += _FIELDS
        self._has = has | bits
        return bits

    def of(self, metric: int) -> _MetricTotals | None:
        """Return what was said of a metric; `None` where it has had no value."""
        if not self._has >> metric & 1:
            return None
        return _MetricTotals(*self._numbers[_FIELDS * metric : _FIELDS * (metric + 1)])


class IntervalValues:
    """The values of the series of one node over the ticks that were added."""

    def __init__(self) -> None:
        self._groups: dict[SeriesGroup, _Totals] = {}
        self._ticks = 0
        self._shared_ns: dict[_Key, list[int]] = {}

    def add(self, values: Mapping[SeriesGroup, SeriesValues], *, interval_ns: int) -> None:
        """Add the values of a tick of that length."""
        self._ticks += 1
        present: dict[_Key, int] = {}
        for group, of_group in values.items():
            totals = self._groups.get(group)
            if totals is None:
                totals = self._groups[group] = _Totals(len(of_group))
            totals.tick = self._ticks
            bits = totals.add(of_group, interval_ns)
            if group.family.is_shared:
                key = (group.family, group.label_values[0])
                present[key] = present.get(key, 0) | bits
        for (family, device), bits in present.items():
            metrics = len(family.metrics)
            shared_ns = self._shared_ns.setdefault((family, device), [0] * metrics)
            for index in range(metrics):
                if bits >> index & 1:
                    shared_ns[index] += interval_ns

    def values(self) -> dict[SeriesGroup, SeriesValues]:
        """Return the values of the interval, the maxima of each group behind it."""
        found: dict[SeriesGroup, SeriesValues] = {}
        for group, totals in self._groups.items():
            family = group.family
            # What only describes is as it was last: a pod whose names came is not told of twice,
            # nor under others' names a device whose labels say who holds it.
            if totals.tick != self._ticks and _is_of_the_last(family):
                continue
            shared_ns: Sequence[int] | None = None
            if family.is_shared:
                shared_ns = self._shared_ns[family, group.label_values[0]]
            metrics = [(metric, totals.of(at)) for at, metric in enumerate(family.metrics)]
            found[group] = tuple(
                _over_interval(metric, of_metric, None if shared_ns is None else shared_ns[at])
                for at, (metric, of_metric) in enumerate(metrics)
            )
            maxima = maxima_of(family)
            if maxima.metrics:
                found[SeriesGroup(maxima, group.label_values)] = tuple(
                    None if of_metric is None else of_metric.maximum
                    for metric, of_metric in metrics
                    if _is_mean(metric)
                )
        return found


def _over_interval(
    metric: FamilyMetric, totals: _MetricTotals | None, shared_ns: int | None
) -> float | None:
    """Return a metric's value over an interval; its ticks are as long as `shared_ns`, if given."""
    if totals is None:
        return None
    if metric.over_interval is OverInterval.LAST:
        return totals.last
    if metric.over_interval is OverInterval.SUM:
        return totals.total
    covered_ns = totals.covered_ns if shared_ns is None else shared_ns
    # Ticks without a length have no weight.
    return totals.weighted / covered_ns if covered_ns else totals.last
