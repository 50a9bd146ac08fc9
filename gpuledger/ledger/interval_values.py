"""The values of series over an interval of several ticks: means and maxima of what ticks read.

A tick counts by its length. What is measured of a device as a whole is averaged over the ticks that
have a value of it. What is booked on those who share a device is averaged over all ticks in which
anybody has a value, container or category: who is not there in a tick had nothing of it, so that
the means of those who share a device sum to the device's mean, as in each tick.

What describes a thing is sent with each interval in which the thing was, once, as it was last: what
is booked on a pod that ended in between can be joined to whose it was.

Every node has an interval open at all times, and most of its ticks have the same groups with values
of the same metrics. For as long as they do, what they sum up to stands in columns, one number for
each metric that has a value (`_AlikeTicks`). From the first tick that is not like the others, each
group has its own totals (`_Totals`), which take four times as much memory. The results are the same
numbers: what is summed is summed in the same order. Pure.
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
"""What is shared, and of which device."""
_Thing = tuple[Family, tuple[str, ...]]
"""What is described, by which family and by the labels by which it is known."""


def maximum_name(name: str) -> str:
    """Return what the maximum of a metric is called: its name, with `max` before its unit."""
    stem, unit = name.rsplit("_", 1)
    return f"{stem}_max_{unit}"


@cache
def maxima_of(family: Family) -> Family:
    """Return the family of the maxima of a family's means; it may have no metric."""
    return Family(
        labels=family.labels,
        metrics=tuple(
            FamilyMetric(
                name=maximum_name(metric.name),
                help=f"The greatest value of a tick of the interval of {metric.name}.",
            )
            for metric in family.metrics
            if _is_mean(metric)
        ),
    )


@cache
def _positions(family: Family) -> tuple[int, ...]:
    return tuple(family.labels.index(label) for label in family.identity or ())


def _thing(group: SeriesGroup) -> _Thing:
    """Return what a group describes."""
    known = tuple(group.label_values[position] for position in _positions(group.family))
    # Of a pod without a UID the names are all that is known.
    return group.family, known if all(known) else group.label_values


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
    """The same of all metrics of one group, in one array."""

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

    def begin(self, metric: int, totals: _MetricTotals) -> None:
        """Go on with a metric that has had no value from what others have summed up."""
        self._numbers[_FIELDS * metric : _FIELDS * (metric + 1)] = array("d", totals)
        self._has |= 1 << metric

    def of(self, metric: int) -> _MetricTotals | None:
        """Return what was said of a metric; `None` where it has had no value."""
        if not self._has >> metric & 1:
            return None
        return _MetricTotals(*self._numbers[_FIELDS * metric : _FIELDS * (metric + 1)])


class _AlikeTicks:
    """What ticks said that have the same groups, in the same order, and values of the same metrics.

    A column has a number for each metric that has a value.
    """

    __slots__ = ("_absent", "_covered_ns", "_groups", "_lasts", "_maxima", "_totals", "_weighted")

    def __init__(self, values: Mapping[SeriesGroup, SeriesValues]) -> None:
        """Begin with ticks that are like this one, which is not added by that."""
        flat = [*chain.from_iterable(values.values())]
        self._groups, self._absent = [*values], absent_in(flat)
        self._covered_ns = 0
        self._lasts = self._maxima = array("d", [value for value in flat if value is not None])
        self._weighted = self._totals = array("d", bytes(8 * len(self._lasts)))

    def add(self, values: Mapping[SeriesGroup, SeriesValues], interval_ns: int) -> bool:
        """Add the values of a tick; return False, with nothing added, where it is not like them."""
        flat = [*chain.from_iterable(values.values())]
        # Mostly the same objects, which compares them at once.
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
        """Yield what was said of each metric of each group; `None` where it has had no value."""
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
    """The values of the series of one node over the ticks that were added."""

    __slots__ = ("_alike", "_groups", "_shared_ns", "_ticks")

    def __init__(self) -> None:
        self._alike: _AlikeTicks | None = None
        """All ticks, for as long as they are alike."""
        self._groups: dict[SeriesGroup, _Totals] = {}
        self._ticks = 0
        self._shared_ns: dict[_Key, array[float]] = {}
        """For each metric the length of the ticks in which any group of the device had a value."""

    def add(self, values: Mapping[SeriesGroup, SeriesValues], *, interval_ns: int) -> None:
        """Add the values of a tick of that length."""
        self._ticks += 1
        if self._ticks == 1:
            self._alike = _AlikeTicks(values)
        if self._alike is None or not self._alike.add(values, interval_ns):
            self._part(self._ticks - 1)
            self._add_by_group(values, interval_ns)

    def _part(self, ticks: int) -> None:
        """Go on by group from ticks that were alike; `ticks` is how many there were."""
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
        """Return the values of the interval, the maxima of each group behind it."""
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
        """Yield what was said of the metrics of each group that has series in this interval.

        Of what is booked on those who share a device, `covered_ns` is that of all of them.
        """
        if self._alike is not None:
            # Who was there in any tick was there in all, and has no other description.
            yield from self._alike.totals()
        last = self._last_descriptions()
        for group, totals in self._groups.items():
            family = group.family
            # A pod whose names came is not told of twice.
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
        """Return the tick that was the last to describe each thing."""
        last: dict[_Thing, int] = {}
        for group, totals in self._groups.items():
            if group.family.identity is not None:
                thing = _thing(group)
                last[thing] = max(totals.tick, last.get(thing, 0))
        return last


def _over_interval(metric: FamilyMetric, totals: _MetricTotals | None) -> float | None:
    """Return a metric's value over an interval."""
    if totals is None:
        return None
    if metric.over_interval is OverInterval.LAST:
        return totals.last
    if metric.over_interval is OverInterval.SUM:
        return totals.total
    # Ticks without a length have no weight.
    return totals.weighted / totals.covered_ns if totals.covered_ns else totals.last
