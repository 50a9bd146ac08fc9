"""The values of series over an interval of several ticks: means and maxima of what ticks read.

A tick counts by its length. What is measured of a device as a whole is averaged over the ticks that
have a value of it. What is booked on those who share a device is averaged over all ticks in which
anybody has a value: who is not there in a tick had nothing of it, so that the means of those who
share a device sum to the device's mean, as in each tick. Pure.
"""

from collections.abc import Collection, Mapping
from functools import cache

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


class _Totals:
    """What the ticks of an interval said of one group."""

    __slots__ = ("covered_ns", "last", "maxima", "sums", "weighted")

    def __init__(self, metrics: int) -> None:
        self.sums = [0.0] * metrics
        self.weighted = [0.0] * metrics
        self.maxima: list[float | None] = [None] * metrics
        self.last: list[float | None] = [None] * metrics
        self.covered_ns = [0] * metrics

    def add(self, values: SeriesValues, interval_ns: int) -> int:
        """Add the values of a tick; return, as bits, which metrics had one."""
        bits, bit = 0, 1
        for index, value in enumerate(values):
            if value is not None:
                bits |= bit
                self.weighted[index] += value * interval_ns
                self.sums[index] += value
                self.covered_ns[index] += interval_ns
                self.last[index] = value
                maximum = self.maxima[index]
                if maximum is None or value > maximum:
                    self.maxima[index] = value
            bit <<= 1
        return bits


class IntervalValues:
    """The values of the series of one node over the ticks that were added."""

    def __init__(self) -> None:
        self._groups: dict[SeriesGroup, _Totals] = {}
        self._last: Collection[SeriesGroup] = ()
        self._shared_ns: dict[_Key, list[int]] = {}

    def add(self, values: Mapping[SeriesGroup, SeriesValues], *, interval_ns: int) -> None:
        """Add the values of a tick of that length."""
        self._last = values.keys()
        present: dict[_Key, int] = {}
        for group, of_group in values.items():
            totals = self._groups.get(group)
            if totals is None:
                totals = self._groups[group] = _Totals(len(of_group))
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
            if group not in self._last and _is_of_the_last(family):
                continue
            shared_ns = totals.covered_ns
            if family.is_shared:
                shared_ns = self._shared_ns[family, group.label_values[0]]
            found[group] = tuple(
                _over_interval(metric, totals, index, shared_ns[index])
                for index, metric in enumerate(family.metrics)
            )
            maxima = maxima_of(family)
            if maxima.metrics:
                pairs = zip(family.metrics, totals.maxima, strict=True)
                found[SeriesGroup(maxima, group.label_values)] = tuple(
                    value for metric, value in pairs if _is_mean(metric)
                )
        return found


def _over_interval(
    metric: FamilyMetric, totals: _Totals, index: int, covered_ns: int
) -> float | None:
    last = totals.last[index]
    if last is None or metric.over_interval is OverInterval.LAST:
        return last
    if metric.over_interval is OverInterval.SUM:
        return totals.sums[index]
    # Ticks without a length have no weight.
    return totals.weighted[index] / covered_ns if covered_ns else last
