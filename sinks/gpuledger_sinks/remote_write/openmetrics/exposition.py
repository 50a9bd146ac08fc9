"""The seam to the parsers of expositions: bytes of a page in, samples out. Pure.

What the page calls its samples is kept: the parser of the text format calls all counters
`…_total`, which is undone here. `…_created` of OpenMetrics is no sample, but when those of its
family began.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from itertools import islice
from typing import Final, NamedTuple, TextIO, cast

from prometheus_client.metrics_core import Metric as ParsedMetric
from prometheus_client.openmetrics.parser import text_fd_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_fd_to_metric_families as parse_text
from prometheus_client.samples import Exemplar as ParsedExemplar
from prometheus_client.samples import Sample as ParsedSample
from prometheus_client.samples import Timestamp

from gpuledger.errors import GpuledgerError
from gpuledger.texts import readable

Labels = tuple[tuple[str, str], ...]
OPENMETRICS: Final = "application/openmetrics-text"
TEXT: Final = "text/plain"
ACCEPTED: Final = (
    f"{OPENMETRICS};version=1.0.0;q=0.6,{OPENMETRICS};version=0.0.1;q=0.5,"
    f"{TEXT};version=0.0.4;q=0.4,*/*;q=0.1"
)
"""What is asked for of a page that has several formats; the parser knows no other escaping."""
_METRIC_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_COUNTER: Final = re.compile(r"\s*#[ \t]+TYPE[ \t]+(\S+)[ \t]+counter\s*")
_CREATED: Final = "_created"
_WITH_STARTS: Final = frozenset({"counter", "histogram", "summary"})
_OF_PARTS: Final = frozenset({"le", "quantile"})
"""Labels that tell the parts of a histogram or summary from each other."""
MAX_LINE_CHARACTERS: Final = 16_384
"""The parsers take time by the square of a line's length, in which nothing else may run."""
PARSE_SECONDS: Final = 10.0
"""How long a page may take to be read."""


class NoExpositionError(GpuledgerError):
    """What a page says is no exposition, or too much of one; the message says what is wrong."""


class ScrapedFamily(NamedTuple):
    """What an exposition says of the samples of one name."""

    name: str
    """As remote-write 1.0 names it: of a counter the name of its samples."""
    kind: str
    help: str
    unit: str


class ScrapedExemplar(NamedTuple):
    """An exemplar of a sample."""

    labels: Labels
    value: float
    time_ms: int | None
    """`None` where the exposition does not say when it was observed."""


class ScrapedSample(NamedTuple):
    """A sample of an exposition."""

    name: str
    labels: Labels
    """Sorted by name, without those that are empty."""
    value: float
    family: ScrapedFamily
    time_ms: int | None = None
    """`None` where the exposition does not say: as of the scrape."""
    start_ms: int | None = None
    """When its counter was 0; `None` where that is not said."""
    exemplar: ScrapedExemplar | None = None


@dataclass(frozen=True, kw_only=True)
class Exposition:
    """What a page says."""

    samples: tuple[ScrapedSample, ...] = ()
    unsendable: int = 0
    """How many samples beside them cannot be sent: by their names, or as native histograms."""


def parse_exposition(
    body: bytes,
    *,
    content_type: str,
    max_samples: int,
    monotonic: Callable[[], float] = time.monotonic,
) -> Exposition:
    """Return what a page says that was served as this type, without its parameters.

    Raises NoExpositionError where it is no exposition, has more than `max_samples` or a line that
    is too long, or takes too long to be read.
    """
    if content_type not in {OPENMETRICS, TEXT}:
        raise NoExpositionError(f"a page of {content_type}, and neither {OPENMETRICS} nor {TEXT}")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise NoExpositionError(f"no UTF-8: {error}") from error
    lines = _PageLines(text, monotonic)
    found = _openmetrics(lines) if content_type == OPENMETRICS else _text_format(lines)
    samples = tuple(islice(found, max_samples + 1))
    if len(samples) > max_samples:
        raise NoExpositionError(f"more than {max_samples} samples")
    sendable = tuple(sample for sample in samples if sample is not None)
    return Exposition(samples=sendable, unsendable=len(samples) - len(sendable))


class _PageLines:
    """The lines of a page, as a parser asks for them, within their bounds."""

    def __init__(self, text: str, monotonic: Callable[[], float]) -> None:
        self._text, self._monotonic = text, monotonic
        self._end_seconds = monotonic() + PARSE_SECONDS
        self.counters: set[str] = set()
        """The names of counters that were said so far."""

    def __iter__(self) -> Iterator[str]:
        for line in StringIO(self._text):
            if len(line) > MAX_LINE_CHARACTERS:
                raise NoExpositionError(f"a line has more than {MAX_LINE_CHARACTERS} characters")
            if self._monotonic() > self._end_seconds:
                raise NoExpositionError(f"it takes more than {PARSE_SECONDS:g} s to be read")
            if counter := _COUNTER.fullmatch(line):
                self.counters.add(counter[1])
            yield line


def _openmetrics(lines: _PageLines) -> Iterator[ScrapedSample | None]:
    for metric in _families(parse_openmetrics, lines):
        starts = dict(_starts_of(metric))
        told = _told_of(metric)
        for sample in metric.samples:
            if metric.type not in _WITH_STARTS or sample.name != metric.name + _CREATED:
                yield _sample(sample, sample.name, told, starts)


def _text_format(lines: _PageLines) -> Iterator[ScrapedSample | None]:
    for metric in _families(parse_text, lines):
        # The parser takes `_total` off a name that has it, and puts it behind one that has not.
        is_plain = metric.type == "counter" and metric.name in lines.counters
        told = _told_of(metric, total="" if is_plain else "_total")
        for sample in metric.samples:
            yield _sample(sample, metric.name if is_plain else sample.name, told, {})


def _families(
    parse: Callable[[TextIO], Iterable[ParsedMetric]], lines: _PageLines
) -> Iterator[ParsedMetric]:
    try:
        yield from parse(cast("TextIO", lines))  # of which a parser asks for the lines alone
    except NoExpositionError:
        raise
    except Exception as error:  # the parsers let through whatever strikes them
        words = readable(str(error)) or type(error).__name__
        raise NoExpositionError(f"no exposition: {words}") from error


def _told_of(metric: ParsedMetric, *, total: str = "_total") -> ScrapedFamily:
    name = metric.name + total if metric.type == "counter" else metric.name
    return ScrapedFamily(name, metric.type, metric.documentation, metric.unit)


def _starts_of(metric: ParsedMetric) -> Iterable[tuple[Labels, int]]:
    for sample in metric.samples if metric.type in _WITH_STARTS else ():
        if sample.name == metric.name + _CREATED:
            yield _labels(sample.labels), _milliseconds(sample.value)


def _sample(
    sample: ParsedSample, name: str, told: ScrapedFamily, starts: Mapping[Labels, int]
) -> ScrapedSample | None:
    """Return a sample; `None` where it cannot be sent."""
    labels = _labels(sample.labels or {})
    has_names = _METRIC_NAME.fullmatch(name) and all(
        _LABEL_NAME.fullmatch(one) for one, _ in labels
    )
    # Native histograms have no value. The text format has them by a proposal alone.
    if not has_names or sample.value is None:
        return None
    start_ms = None
    if starts:
        whole = tuple(label for label in labels if label[0] not in _OF_PARTS)
        start_ms = starts.get(labels, starts.get(whole))
    return ScrapedSample(
        name,
        labels,
        _number(sample.value),
        told,
        None if sample.timestamp is None else _milliseconds(sample.timestamp),
        start_ms,
        _exemplar(sample.exemplar) if sample.exemplar else None,
    )


def _exemplar(exemplar: ParsedExemplar) -> ScrapedExemplar:
    time_ms = None if exemplar.timestamp is None else _milliseconds(exemplar.timestamp)
    return ScrapedExemplar(tuple(exemplar.labels.items()), _number(exemplar.value), time_ms)


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted((name, value) for name, value in labels.items() if value))


def _number(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        # Integers come as such: one that is larger than any float is infinite to Prometheus.
        return math.inf if value > 0 else -math.inf


def _milliseconds(seconds: float | Timestamp) -> int:
    try:
        return round(float(seconds) * 1000)
    except (ValueError, OverflowError) as error:
        raise NoExpositionError(f"no exposition: a time that is none: {error}") from error
