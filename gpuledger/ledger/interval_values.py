"""Values of series over an interval of several ticks: means and maxima.

Ticks are weighted by their length. A value of a whole device is averaged over the ticks that have
the value. The users of a device are containers and categories. Their values are averaged over all
ticks in which any user of the device has a value; a user that is not in a tick counts as 0. The
means of a device's users therefore add up to the device's mean, as they do in each tick.

Series that describe a thing are sent once for each interval in which the thing existed, with their
last labels and value. The use of a pod that ended during the interval can therefore be joined to
the pod's owner.

Every node has an open interval at all times, and most of its ticks have the same groups with values
of the same metrics. As long as they do, the sums are kept in columns, with one number per metric
that has a value (`_AlikeTicks`). From the first tick that differs, each group has its own totals
(`_Totals`), which take four times as much memory. Both ways give exactly the same results, because
they add values in the same order. This module does no I/O.
"""

from array import array
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from operator import add
from typing import Final, NamedTuple

from gpuledger.ledger.families import Family, FamilyMetric, OverInterval, SharedOfDevice
from gpuledger.ledger.series import SeriesGroup, SeriesValues, absent_in

_Key = tuple[SharedOfDevice, str]
"""The kind of share, and the UUID of the device."""
_Thing = tuple[Family, tuple[str, ...]]
"""The described thing: the family, and the labels that identify it."""


def maximum_name(name: str) -> str:
    """Return the name of a metric's maximum: the metric's name, with `max` before the unit."""
    stem, unit = name.rsplit("_", 1)
    return f"{stem}_max_{unit}"


@cache
def maxima_of(family: Family) -> Family:
    """Return the family of the maxima: one metric for each metric of `family` that is a mean."""
    return Family(
        labels=family.labels,
        metrics=tuple(
            FamilyMetric(
                name=maximum_name(metric.name),
                help=f"Maximum of {metric.name} in the samples of the interval.",
            )
            for metric in family.metrics
            if _is_mean(metric)
        ),
    )


@cache
def _positions(family: Family) -> tuple[int, ...]:
    return tuple(family.labels.index(label) for label in family.identity or ())


def _thing(group: SeriesGroup) -> _Thing:
    """Return the key of the thing, such as a pod, that a group of a describing family describes."""
    known = tuple(group.label_values[position] for position in _positions(group.family))
    # A pod without a UID is identified by all its labels.
    return group.family, known if all(known) else group.label_values


def _is_mean(metric: FamilyMetric) -> bool:
    return metric.over_interval is OverInterval.MEAN


class _MetricTotals(NamedTuple):
    """The sums of one metric over the ticks of an interval."""

    weighted: float
    """Sum of the values times the lengths of their ticks, in nanoseconds."""
    total: float
    """Sum of the values."""
    maximum: float
    last: float
    covered_ns: float
    """Total length of the ticks that had a value; exact up to a hundred days."""


_FIELDS: Final = len(_MetricTotals._fields)


class _Totals:
    """The `_MetricTotals` of all metrics of one group, in one array."""

    __slots__ = ("_has", "_numbers", "tick")

    def __init__(self, metrics: int) -> None:
        self._numbers = array("d", bytes(8 * _FIELDS * metrics))
        self._has = 0
        """Bit n is set if metric n has had a value."""
        self.tick = 0
        """Number of the last tick with this group."""

    def add(self, values: SeriesValues, interval_ns: int) -> int:
        """Add the values of a tick; return a bit mask of the metrics that had one."""
        bits, bit, at = 0, 1, 0
        numbers, has = self._numbers, self._has
        for value in values:
            if value is not None:
                bits |= bit
                # In the order of the fields of `_MetricTotals`.
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

    def begin(self, metric: int, totals: _MetricTotals) -> None:
        """Set the first totals of a metric, which come from earlier ticks."""
        self._numbers[_FIELDS * metric : _FIELDS * (metric + 1)] = array("d", totals)
        self._has |= 1 << metric

    def of(self, metric: int) -> _MetricTotals | None:
        """Return the totals of a metric; `None` if it has had no value."""
        if not self._has >> metric & 1:
            return None
        return _MetricTotals(*self._numbers[_FIELDS * metric : _FIELDS * (metric + 1)])


class _AlikeTicks:
    """The totals of several ticks that are alike.

    Alike ticks have the same groups in the same order, and values of the same metrics. A column has
    one number for each metric that has a value.
    """

    __slots__ = ("_absent", "_covered_ns", "_groups", "_lasts", "_maxima", "_totals", "_weighted")

    def __init__(self, values: Mapping[SeriesGroup, SeriesValues]) -> None:
        """Prepare for ticks that are like the tick with these values; do not add that tick."""
        flat = [*chain.from_iterable(values.values())]
        self._groups, self._absent = [*values], absent_in(flat)
        self._covered_ns = 0
        self._lasts = self._maxima = array("d", [value for value in flat if value is not None])
        self._weighted = self._totals = array("d", bytes(8 * len(self._lasts)))

    def add(self, values: Mapping[SeriesGroup, SeriesValues], interval_ns: int) -> bool:
        """Add the values of a tick; if the tick differs, add nothing and return false."""
        flat = [*chain.from_iterable(values.values())]
        # Groups are mostly the same objects in each tick, which makes the comparison fast.
        if absent_in(flat) != self._absent or [*values] != self._groups:
            return False
        had = [value for value in flat if value is not None]
        self._covered_ns += interval_ns
        weighted = zip(self._weighted, had, strict=True)
        self._weighted = array("d", [total + value * interval_ns for total, value in weighted])
        self._totals = array("d", map(add, self._totals, had))
        self._maxima = array("d", map(max, self._maxima, had))
        self._lasts = array("d", had)
        return True

    def totals(self) -> Iterator[tuple[SeriesGroup, list[_MetricTotals | None]]]:
        """Yield the totals of each metric of each group; `None` if it has had no value."""
        columns = zip(self._weighted, self._totals, self._maxima, self._lasts, strict=True)
        absent = iter(self._absent)
        for group in self._groups:
            yield (
                group,
                [
                    None if next(absent) else _MetricTotals(*next(columns), self._covered_ns)
                    for _ in group.family.metrics
                ],
            )


class IntervalValues:
    """Computes the values of one node's series over all ticks that were added."""

    __slots__ = ("_alike", "_groups", "_shared_ns", "_ticks")

    def __init__(self) -> None:
        self._alike: _AlikeTicks | None = None
        """All ticks, as long as they are alike."""
        self._groups: dict[SeriesGroup, _Totals] = {}
        self._ticks = 0
        self._shared_ns: dict[_Key, array[float]] = {}
        """For each kind of share and device, by metric: total length of the ticks in which any
        group of the device had a value."""

    def add(self, values: Mapping[SeriesGroup, SeriesValues], *, interval_ns: int) -> None:
        """Add the values of a tick of this length."""
        self._ticks += 1
        if self._ticks == 1:
            self._alike = _AlikeTicks(values)
        if self._alike is None or not self._alike.add(values, interval_ns):
            self._part(self._ticks - 1)
            self._add_by_group(values, interval_ns)

    def _part(self, ticks: int) -> None:
        """Move the sums from columns to totals by group, if they are in columns.

        `ticks` is the number of ticks added so far.
        """
        if self._alike is None:
            return
        for group, of_metrics in self._alike.totals():
            totals = self._groups[group] = _Totals(len(of_metrics))
            totals.tick = ticks
            for metric, of_metric in enumerate(of_metrics):
                if of_metric is not None:
                    totals.begin(metric, of_metric)
            if (shares := group.family.shares) is not None:
                key = (shares, group.label_values[0])
                shared_ns = self._shared_ns.setdefault(key, array("d", bytes(8 * len(of_metrics))))
                for metric, of_metric in enumerate(of_metrics):
                    if of_metric is not None:
                        shared_ns[metric] = of_metric.covered_ns
        self._alike = None

    def _add_by_group(self, values: Mapping[SeriesGroup, SeriesValues], interval_ns: int) -> None:
        present: dict[_Key, int] = {}
        for group, of_group in values.items():
            totals = self._groups.get(group)
            if totals is None:
                totals = self._groups[group] = _Totals(len(of_group))
            totals.tick = self._ticks
            bits = totals.add(of_group, interval_ns)
            if (shares := group.family.shares) is not None:
                key = (shares, group.label_values[0])
                present[key] = present.get(key, 0) | bits
                if key not in self._shared_ns:
                    self._shared_ns[key] = array("d", bytes(8 * len(of_group)))
        for key, bits in present.items():
            shared_ns = self._shared_ns[key]
            for index in range(len(shared_ns)):
                if bits >> index & 1:
                    shared_ns[index] += interval_ns

    def values(self) -> dict[SeriesGroup, SeriesValues]:
        """Return the values over all added ticks; a group's maxima follow directly after it."""
        found: dict[SeriesGroup, SeriesValues] = {}
        for group, of_metrics in self._of_groups():
            metrics = [*zip(group.family.metrics, of_metrics, strict=True)]
            found[group] = tuple([_over_interval(*of_metric) for of_metric in metrics])
            maxima = maxima_of(group.family)
            if maxima.metrics:
                found[SeriesGroup(maxima, group.label_values)] = tuple(
                    [
                        None if of_metric is None else of_metric.maximum
                        for metric, of_metric in metrics
                        if _is_mean(metric)
                    ]
                )
        return found

    def _of_groups(self) -> Iterator[tuple[SeriesGroup, list[_MetricTotals | None]]]:
        """Yield the totals of each group that has series in this interval.

        If a group divides a device with others, its `covered_ns` is the length of the ticks in
        which any of these groups had a value.
        """
        if self._alike is not None:
            # All ticks have the same groups, so no description changed in the interval.
            yield from self._alike.totals()
        last = self._last_descriptions()
        for group, totals in self._groups.items():
            family = group.family
            # Only the last description counts: a pod whose names became known has two.
            if family.identity is not None and last[_thing(group)] != totals.tick:
                continue
            of_metrics = [*map(totals.of, range(len(family.metrics)))]
            if family.shares is not None:
                shared_ns = self._shared_ns[family.shares, group.label_values[0]]
                of_metrics = [
                    None if of_metric is None else of_metric._replace(covered_ns=covered_ns)
                    for of_metric, covered_ns in zip(of_metrics, shared_ns, strict=True)
                ]
            yield group, of_metrics

    def _last_descriptions(self) -> Mapping[_Thing, int]:
        """Return, for each described thing, the number of the last tick that described it."""
        last: dict[_Thing, int] = {}
        for group, totals in self._groups.items():
            if group.family.identity is not None:
                thing = _thing(group)
                last[thing] = max(totals.tick, last.get(thing, 0))
        return last


def _over_interval(metric: FamilyMetric, totals: _MetricTotals | None) -> float | None:
    """Return a metric's value over an interval from its totals; `None` if it had no value."""
    if totals is None:
        return None
    if metric.over_interval is OverInterval.LAST:
        return totals.last
    if metric.over_interval is OverInterval.SUM:
        return totals.total
    # Ticks of length 0 have no weight.
    return totals.weighted / totals.covered_ns if totals.covered_ns else totals.last
