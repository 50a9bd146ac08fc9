"""From scrapes of one target to requests: labels, what is told of the target, ends. Pure.

As Prometheus has it. What is scraped has the labels `job` and `instance` of the target; its own of
these names become `exported_job` and `exported_instance`. The target's `up` and what a scrape came
to are series too, which nothing that is scraped can be. A series that was in the last scrape and is
in this one no more ends with a stale marker at this one's time, as all do where a scrape fails;
but those whose times the page gives, which may come seldom.

A sample is sent where it is later than what its series has, so that times go up in each of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import ClassVar, Final, NamedTuple

from gpuledger_sinks.remote_write.openmetrics.exposition import (
    Exposition,
    Labels,
    ScrapedExemplar,
    ScrapedFamily,
    ScrapedSample,
)
from gpuledger_sinks.remote_write.tenants import ONE_TENANT
from gpuledger_sinks.remote_write.wire import (
    STALE_VALUE,
    Exemplar,
    LabelSet,
    Metric,
    MetricSet,
    SampleGroup,
    TimedSamples,
    Version,
    encode_request,
    encode_start,
    encode_time,
    encode_value,
    is_encodable,
)

EXPORTED: Final = "exported_"
_REPORTED: Final = {
    metric.name: metric
    for metric in (
        Metric(name="up", kind="gauge", help="1 where the last scrape succeeded, 0 where not."),
        Metric(name="scrape_duration_seconds", kind="gauge", help="Time that the scrape took."),
        Metric(
            name="scrape_samples_scraped", kind="gauge", help="Samples that the target exposed."
        ),
        Metric(
            name="scrape_samples_post_metric_relabeling",
            kind="gauge",
            help="The same, as nothing is relabelled.",
        ),
        Metric(
            name="scrape_series_added",
            kind="gauge",
            help="Series of the scrape that were not in the one before it.",
        ),
    )
}
"""What is told of each scrape, by the names that Prometheus has for it."""
_TIMES_END_MS: Final = 1 << 63
_INVALID: Final = "invalid"
_DUPLICATE: Final = "duplicate"
_OUT_OF_ORDER: Final = "out_of_order"
_FUTURE: Final = "future"
_TOO_OLD: Final = "too_old"


class TimeLimits(NamedTuple):
    """How far from its scrape the time may be that the page gives a sample, in milliseconds."""

    max_ahead_ms: int
    max_age_ms: int | None
    """`None` where no age is too much."""


@dataclass(frozen=True, kw_only=True)
class Scrape:
    """What came of one scrape."""

    time_ms: int
    duration_seconds: float
    exposition: Exposition | None
    """`None` where it failed."""


class _Timed(NamedTuple):
    time_ms: int
    group: SampleGroup
    value: bytes


@dataclass(frozen=True, kw_only=True)
class ScrapeRequest:
    """Samples of one scrape that travel together."""

    timed: Sequence[_Timed]
    """By their times, one sample a group."""
    tenant: ClassVar[str] = ONE_TENANT
    """A page that is scraped is of no namespace."""

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return len(self.timed)

    def encode(self, version: Version) -> bytes:
        """Return the body of a request, not compressed."""
        by_time = groupby(self.timed, key=attrgetter("time_ms"))
        return encode_request(version, (_at_once(time_ms, timed) for time_ms, timed in by_time))


def _at_once(time_ms: int, timed: Iterable[_Timed]) -> TimedSamples:
    _, groups, values = zip(*timed, strict=True)
    return TimedSamples(encode_time(time_ms), groups, values)


@dataclass(frozen=True, kw_only=True)
class EncodedScrape:
    """What is sent of one scrape."""

    timed: Sequence[_Timed]
    dropped: Mapping[str, int]
    """How many samples are not sent, by reason."""

    def requests(self, max_samples: int) -> Iterator[ScrapeRequest]:
        """Yield it in requests of at most so many samples, in their order."""
        for start in range(0, len(self.timed), max_samples):
            yield ScrapeRequest(timed=self.timed[start : start + max_samples])


@dataclass(slots=True)
class _Series:
    labels: LabelSet
    metric_set: MetricSet
    """Of one metric."""
    has_own_times: bool = False
    latest_ms: int = -1
    """Time of the last sample that was sent."""
    latest: bytes = b""
    """Its value."""
    exemplar: ScrapedExemplar | None = None
    """The last one that was sent."""


class ScrapedSeries:
    """The series of one target that its last scrape had."""

    def __init__(
        self,
        *,
        job: str,
        instance: str,
        external_labels: Mapping[str, str],
        limits: TimeLimits,
    ) -> None:
        """Take the target's labels; external ones are given to series that have none such."""
        self._target = {"job": job, "instance": instance}
        self._external, self._limits = external_labels, limits
        self._series: dict[tuple[str, Labels], _Series] = {}
        self._metrics: dict[tuple[str, ScrapedFamily], MetricSet] = {}
        self._reported = {
            name: _Series(self._labels(()), MetricSet([metric]))
            for name, metric in _REPORTED.items()
        }

    def metrics(self) -> Iterable[Metric]:
        """Return what the last scrape said of its metrics, one for each family."""
        families = {family for _, family in self._metrics}
        scraped = (
            Metric(name=one.name, kind=one.kind, help=one.help, unit=one.unit)
            for one in sorted(families)
        )
        return (*_REPORTED.values(), *scraped)

    def add(self, scrape: Scrape) -> EncodedScrape:
        """Return what is to be sent of a scrape, and remember what it had."""
        exposition = scrape.exposition or Exposition()
        made = _Made(dropped=Counter({_INVALID: exposition.unsendable}))
        before, self._series = self._series, {}
        metrics_before, self._metrics = self._metrics, {}
        added = 0
        for sample in exposition.samples:
            key = (sample.name, self._renamed(sample.labels))
            is_repeated = key in self._series and sample.time_ms is None
            if is_repeated or (sample.name in _REPORTED and not sample.labels):
                made.dropped[_DUPLICATE] += 1
                continue
            metric_set = self._metric_set(sample, metrics_before)
            series = self._series.get(key) or before.get(key)
            if series is None:
                added += 1
                series = _Series(self._labels(key[1]), metric_set)
            series.metric_set = metric_set
            self._series[key] = series
            self._send(sample, series, scrape.time_ms, made)
        for key in before.keys() - self._series.keys():
            if not before[key].has_own_times:
                made.add(before[key], scrape.time_ms, STALE_VALUE)
        samples = float(len(exposition.samples) + exposition.unsendable)
        self._report(
            made,
            scrape.time_ms,
            up=float(scrape.exposition is not None),
            scrape_duration_seconds=scrape.duration_seconds,
            scrape_samples_scraped=samples,
            scrape_samples_post_metric_relabeling=samples,
            scrape_series_added=float(added),
        )
        # Of one series the later sample stands behind the earlier one already.
        made.timed.sort(key=lambda one: one.time_ms)
        return EncodedScrape(timed=made.timed, dropped=+made.dropped)

    def _send(self, sample: ScrapedSample, series: _Series, scraped_ms: int, made: "_Made") -> None:
        time_ms = scraped_ms
        series.has_own_times = sample.time_ms is not None
        if sample.time_ms is not None:
            time_ms = sample.time_ms
            if reason := self._refusal(time_ms, scraped_ms):
                made.dropped[reason] += 1
                return
            if time_ms == series.latest_ms and encode_value(sample.value) == series.latest:
                return  # the page still shows it
        exemplar = None
        if sample.exemplar is not None and sample.exemplar != series.exemplar:
            series.exemplar = sample.exemplar
            exemplar = _exemplar(sample.exemplar, time_ms)
        made.add(series, time_ms, encode_value(sample.value), sample.start_ms, exemplar)

    def _refusal(self, time_ms: int, scraped_ms: int) -> str | None:
        """Return why no sample of that time is sent; `None` where one is."""
        ahead_ms = time_ms - scraped_ms
        if not is_encodable(time_ms):
            return _INVALID
        if ahead_ms > self._limits.max_ahead_ms:
            return _FUTURE
        if self._limits.max_age_ms is not None and -ahead_ms > self._limits.max_age_ms:
            return _TOO_OLD
        return None

    def _report(self, made: "_Made", time_ms: int, **values: float) -> None:
        for name, value in values.items():
            made.add(self._reported[name], time_ms, encode_value(value))

    def _renamed(self, labels: Labels) -> Labels:
        """Return a series' own labels, those renamed that have the target's names."""
        names = {name for name, _ in labels}
        if names.isdisjoint(self._target):
            return labels
        renamed = []
        for name, value in labels:
            given = name
            while given in self._target or (given != name and given in names):
                given = EXPORTED + given
            renamed.append((given, value))
        return tuple(sorted(renamed))

    def _labels(self, labels: Labels) -> LabelSet:
        return LabelSet({**self._external, **dict(labels), **self._target}.items())

    def _metric_set(
        self, sample: ScrapedSample, before: Mapping[tuple[str, ScrapedFamily], MetricSet]
    ) -> MetricSet:
        key = (sample.name, sample.family)
        if (metric_set := self._metrics.get(key) or before.get(key)) is None:
            family = sample.family
            metric = Metric(name=sample.name, kind=family.kind, help=family.help, unit=family.unit)
            metric_set = MetricSet([metric])
        self._metrics[key] = metric_set
        return metric_set


@dataclass(slots=True)
class _Made:
    """What is made of a scrape, as it grows."""

    dropped: Counter[str]
    timed: list[_Timed] = field(default_factory=list)

    def add(
        self,
        series: _Series,
        time_ms: int,
        value: bytes,
        start_ms: int | None = None,
        exemplar: Exemplar | None = None,
    ) -> None:
        """Add a sample, where it is later than the last one of its series."""
        if time_ms <= series.latest_ms:
            self.dropped[_DUPLICATE if time_ms == series.latest_ms else _OUT_OF_ORDER] += 1
            return
        series.latest_ms, series.latest = time_ms, value
        has_start = start_ms is not None and is_encodable(start_ms)
        self.timed.append(
            _Timed(
                time_ms,
                SampleGroup(
                    series.labels,
                    series.metric_set,
                    (encode_start(start_ms),) if has_start else None,
                    (exemplar,) if exemplar is not None else None,
                ),
                value,
            )
        )


def _exemplar(scraped: ScrapedExemplar, time_ms: int) -> Exemplar | None:
    """Return an exemplar with its sample's time where it has none; `None` where it has a bad one.

    The protocol asks for a time.
    """
    observed_ms = time_ms if scraped.time_ms is None else scraped.time_ms
    if not 0 < observed_ms < _TIMES_END_MS:
        return None
    return Exemplar(scraped.labels, scraped.value, observed_ms)
