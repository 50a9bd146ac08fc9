"""Remote-write on the wire: samples into requests of version 1.0 or 2.0, compared with protobuf.

Protobuf by hand. The labels of a thing never change and its metrics are known, so that both are
encoded once (`LabelSet`, `Metric`) and a series is put together of them. How they are put together
is the version's: 1.0 writes a series' labels out, 2.0 writes each string once in a request and
refers to it by its position (`_Symbols`), so that what refers is made for each request anew. Which
version a receiver takes may turn out after its ticks were cut into requests, so samples are kept as
`SampleGroup` and encoded as they are sent.

Here lives how bytes look. Which series there are, and when they end, is `active_series`'; what a
receiver answers is `write_client`'s. Pure.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

Labels = Iterable[tuple[str, str]]
encode_value: Final[Callable[[float], bytes]] = struct.Struct("<d").pack
STALE_VALUE: Final = bytes.fromhex("020000000000f07f")
"""The NaN 0x7ff0000000000002, which says that a series has ended; as bytes, since arithmetic and
JSON lose it."""
NO_START: Final = b""
"""The start of a series of which none is known, or that has none."""
_FIRST_MS: Final = 1 << 35
_VALUE_BYTES: Final = 8
_TIME_BYTES: Final = 7
"""Of a time with its field, as of a start."""
_LAST_MS: Final = (1 << 42) - 1
_NAME: Final = b"__name__"
# What stands before a sample's value: field, length of the sample, field of the value (64 bit).
_SAMPLE: Final = b"\x12\x10\x09"
_SAMPLE_WITH_START: Final = b"\x12\x17\x09"
# The same enumeration in both versions; what it does not have is sent as unknown.
_KINDS: Final = {"counter": 1, "gauge": 2}
_UNITS: Final = (
    "byte_seconds",  # before the one that it ends in
    "bytes",
    "celsius",
    "hertz",
    "joules",
    "ratio",
    "seconds",
    "watts",
)


class Version(StrEnum):
    """A version of remote-write."""

    V1 = "1.0"
    V2 = "2.0"


@lru_cache(maxsize=4096)
def varint(number: int) -> bytes:
    """Encode a non-negative integer as protobuf does; raises ValueError for a negative one."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  # seven bits a byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_time(time_ms: int) -> bytes:
    """Encode what follows a sample's value: its time in milliseconds since the epoch.

    Raises ValueError before 1971-02-02 and after 2109-05-15, where it is not the 7 bytes on which
    the lengths count.
    """
    return b"\x10" + _six_bytes(time_ms)


def encode_start(start_ms: int | None) -> bytes:
    """Encode when a counter began, in milliseconds since the epoch; raises as `encode_time`."""
    return NO_START if start_ms is None else b"\x18" + _six_bytes(start_ms)


def is_encodable(time_ms: int) -> bool:
    """Return whether a time is one that the wire carries."""
    return _FIRST_MS <= time_ms <= _LAST_MS


def _six_bytes(time_ms: int) -> bytes:
    if not is_encodable(time_ms):
        raise ValueError(f"time_ns: {time_ms} ms since the epoch is not between 1971 and 2109")
    return varint(time_ms)


class Metric:
    """A metric's name and what is said of it."""

    __slots__ = ("help", "kind", "label", "name", "unit")

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        help: str,  # noqa: A002  # Prometheus' word
    ) -> None:
        """Take what a family says of it; the unit is the end of its name."""
        self.name, self.kind, self.help = name, kind, help
        base = name.removesuffix("_total")
        self.unit = next((unit for unit in _UNITS if base.endswith(f"_{unit}")), "")
        self.label = _encode_label(_NAME, name.encode())
        """Its name as a label in 1.0."""


class Label:
    """A label's name and value, one object for all series that have it."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str) -> None:
        """Take them as they are sent."""
        self.name, self.value = name, value


_HeldLabels = tuple[Label, ...] | bytes
"""Labels, or what they are in 1.0; behind the name with `_SAMPLE`."""


@lru_cache(maxsize=1024)
def _label(name: str, value: str) -> Label:
    # A node's series begin together and have most of their labels in common. Which of them are one
    # object is a matter of memory and time alone.
    return Label(name, value)


class LabelSet:
    """The labels of one thing, whose metrics are series: all but `__name__`.

    They are held in the form of the version in which they were sent last: as objects for 2.0, and
    encoded for 1.0, where that is more than half of what a series takes of memory.
    """

    __slots__ = ("after", "before")

    def __init__(self, labels: Labels) -> None:
        """Sort labels by name and leave empty values out, as the protocol asks.

        Raises ValueError for a name that comes twice, and for what is no UTF-8.
        """
        # By bytes, as receivers compare them; a label without a value is none to Prometheus.
        present = sorted((name.encode(), name, value) for name, value in labels if value)
        names = [name for name, _, _ in present]
        if len(set(names)) != len(names) or _NAME in names:
            raise ValueError(f"a label comes twice: {[name.decode() for name in names]}")
        "".join(value for _, _, value in present).encode()
        self.before: _HeldLabels = tuple([_label(*pair) for name, *pair in present if name < _NAME])
        """Those that stand before `__name__`, in the form in which they are held."""
        self.after: _HeldLabels = tuple([_label(*pair) for name, *pair in present if name > _NAME])
        """Those that stand behind it."""

    @property
    def size_bytes(self) -> int:
        """How long its names and values are, in either form."""
        return sum(len(one.name) + len(one.value) for part in self._as_labels() for one in part)

    def around_name(self) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
        """Return those that stand before `__name__`, and those that stand behind it."""
        before, after = self.before, self.after
        if isinstance(before, bytes) or isinstance(after, bytes):
            before, after = self.before, self.after = self._as_labels()
        return before, after

    def encoded(self) -> tuple[bytes, bytes]:
        """Return what stands before and behind the name in 1.0; encoded when it is first asked."""
        before, after = self.before, self.after
        if isinstance(before, tuple) or isinstance(after, tuple):
            labels_before, labels_after = self._as_labels()
            self.before = before = _encode_labels(labels_before)
            self.after = after = _encode_labels(labels_after) + _SAMPLE
        return before, after

    def _as_labels(self) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
        before, after = self.before, self.after
        if isinstance(before, bytes):
            before = _decode_labels(before)
        if isinstance(after, bytes):
            after = _decode_labels(after[: -len(_SAMPLE)])
        return before, after


class MetricSet:
    """Metrics of one thing that have a sample; the same object for as long as they are the same."""

    __slots__ = ("bits", "metrics")

    def __init__(self, metrics: Iterable[Metric], *, bits: int = 0) -> None:
        """Take them in the order of the samples, and which of the thing's metrics they are."""
        self.metrics, self.bits = tuple(metrics), bits


class SampleGroup(NamedTuple):
    """The series of one thing that have a sample at one time."""

    labels: LabelSet
    metrics: MetricSet
    starts: Sequence[bytes] | None = None
    """For each metric when its series began, by `encode_start`, of which none is `NO_START`; `None`
    where none has a start."""


class TimedSamples(NamedTuple):
    """Samples of one time."""

    time: bytes
    """By `encode_time`."""
    groups: Sequence[SampleGroup]
    values: Sequence[bytes]
    """For each metric of each group its value, by `encode_value`, or STALE_VALUE."""


def encode_request(version: Version, samples: Iterable[TimedSamples]) -> bytes:
    """Return the body of a request, not compressed; series stand in it in the order given."""
    return _encode_v2(samples) if version is Version.V2 else _encode_v1(samples)


def encode_metadata(metrics: Iterable[Metric]) -> bytes:
    """Return what a request of 1.0 says of metrics; it may be put behind its samples."""
    parts: list[bytes] = []
    for metric in metrics:
        family = metric.name.encode()
        body = b"".join(
            (
                b"\x08" + varint(_KINDS[metric.kind]) if metric.kind in _KINDS else b"",
                *_field(b"\x12", family),
                *_field(b"\x22", metric.help.encode()),
                *_field(b"\x2a", metric.unit.encode()),
            )
        )
        parts += (b"\x1a", varint(len(body)), body)
    return b"".join(parts)


def _encode_v1(samples: Iterable[TimedSamples]) -> bytes:
    parts: list[bytes] = []
    for time, groups, values in samples:
        at = 0
        for labels, metric_set, _ in groups:
            before, after = labels.before, labels.after
            # Asked here, as a call for each thing would take a twentieth of the time.
            if isinstance(before, tuple) or isinstance(after, tuple):
                before, after = labels.encoded()
            for head, label in _heads_v1(metric_set, len(before) + len(after)):
                parts += (head, before, label, after, values[at], time)
                at += 1
    return b"".join(parts)


def _encode_v2(samples: Iterable[TimedSamples]) -> bytes:
    parts: list[bytes] = []
    symbols = _Symbols()
    referred = _ReferredSets(_ReferredLabels(symbols))
    described = _DescribedMetrics(symbols)
    frames = _SeriesFrames(described)
    for time, groups, values in samples:
        at = 0
        for labels, metric_set, starts in groups:
            before, after = referred[labels]
            after += _SAMPLE if starts is None else _SAMPLE_WITH_START
            if starts is None:
                # The hot path: five parts a series, of which the value alone is of this tick.
                for head, metadata in frames[metric_set, before, len(after), False]:
                    parts += (head, after, values[at], time, metadata)
                    at += 1
            else:
                framed = frames[metric_set, before, len(after), True]
                for (head, metadata), start in zip(framed, starts, strict=True):
                    parts += (head, after, values[at], time, start, metadata)
                    at += 1
    return b"".join((*map(_encode_symbol, symbols), *parts))


class _Symbols(dict[str, bytes]):
    """The strings of one request of 2.0, in their order, and what refers to each."""

    def __init__(self) -> None:
        super().__init__()
        self[""] = varint(0)  # always the first

    def __missing__(self, symbol: str) -> bytes:
        reference = self[symbol] = varint(len(self))
        return reference


class _ReferredLabels(dict[Label, bytes]):
    """What refers to a label in one request of 2.0."""

    def __init__(self, symbols: _Symbols) -> None:
        super().__init__()
        self._symbols = symbols

    def __missing__(self, label: Label) -> bytes:
        referred = self[label] = self._symbols[label.name] + self._symbols[label.value]
        return referred


class _ReferredSets(dict[LabelSet, tuple[bytes, bytes]]):
    """What refers to labels before and behind the name in one request of 2.0."""

    def __init__(self, referred: _ReferredLabels) -> None:
        super().__init__()
        self._refer = referred.__getitem__

    def __missing__(self, labels: LabelSet) -> tuple[bytes, bytes]:
        before, after = labels.around_name()
        found = b"".join(map(self._refer, before)), b"".join(map(self._refer, after))
        self[labels] = found
        return found


class _DescribedMetrics(dict[Metric, tuple[bytes, bytes]]):
    """The metrics of one request of 2.0: what refers to the name, and the metadata."""

    def __init__(self, symbols: _Symbols) -> None:
        super().__init__()
        self._symbols = symbols

    def __missing__(self, metric: Metric) -> tuple[bytes, bytes]:
        symbols = self._symbols
        body = b"".join(
            (
                b"\x08" + varint(_KINDS[metric.kind]) if metric.kind in _KINDS else b"",
                b"\x18" + symbols[metric.help] if metric.help else b"",
                b"\x20" + symbols[metric.unit] if metric.unit else b"",
            )
        )
        name = symbols[_NAME.decode()] + symbols[metric.name]
        described = self[metric] = (name, b"\x2a" + varint(len(body)) + body)
        return described


class _SeriesFrames(dict[tuple[MetricSet, bytes, int, bool], list[tuple[bytes, bytes]]]):
    """For each metric of a set what stands before and behind the rest of its series in 2.0.

    Things whose labels have as many bytes differ in nothing but that rest. The key is the metrics,
    what refers to labels before the name, the bytes from behind the name up to the value, and
    whether samples have a start.
    """

    def __init__(self, described: _DescribedMetrics) -> None:
        super().__init__()
        self._described = described

    def __missing__(self, key: tuple[MetricSet, bytes, int, bool]) -> list[tuple[bytes, bytes]]:
        metric_set, before, after_bytes, has_start = key
        sample_tag_bytes, start_bytes = len(_SAMPLE), _TIME_BYTES if has_start else 0
        labels_bytes = len(before) + after_bytes - sample_tag_bytes
        found: list[tuple[bytes, bytes]] = []
        for metric in metric_set.metrics:
            name, metadata = self._described[metric]
            head = _head_v2(labels_bytes + len(name), len(metadata) + start_bytes)
            found.append((head + before + name, metadata))
        self[key] = found
        return found


@lru_cache(maxsize=4096)
def _heads_v1(metric_set: MetricSet, labels_bytes: int) -> list[tuple[bytes, bytes]]:
    """Return what each series begins with, and its name as a label.

    Its other labels and `_SAMPLE` have so many bytes.
    """
    return [
        (_head_v1(labels_bytes + len(metric.label)), metric.label) for metric in metric_set.metrics
    ]


@lru_cache(maxsize=4096)
def _head_v1(labels_bytes: int) -> bytes:
    """Return what a series begins with; its labels and `_SAMPLE` have so many bytes."""
    return b"\x0a" + varint(labels_bytes + _VALUE_BYTES + _TIME_BYTES)


@lru_cache(maxsize=4096)
def _head_v2(refs_bytes: int, rest_bytes: int) -> bytes:
    """Return what a series begins with; `rest_bytes` are start and metadata."""
    refs = varint(refs_bytes)
    sample_bytes = len(_SAMPLE) + _VALUE_BYTES + _TIME_BYTES
    size = 1 + len(refs) + refs_bytes + sample_bytes + rest_bytes
    return b"".join((b"\x2a", varint(size), b"\x0a", refs))


@lru_cache(maxsize=4096)
def _encode_symbol(symbol: str) -> bytes:
    # Also where it is empty: the first one is.
    text = symbol.encode()
    return b"".join((b"\x22", varint(len(text)), text))


def _encode_labels(labels: Iterable[Label]) -> bytes:
    return b"".join(_encode_label(one.name.encode(), one.value.encode()) for one in labels)


def _encode_label(name: bytes, value: bytes) -> bytes:
    pair = b"".join((*_field(b"\x0a", name), *_field(b"\x12", value)))
    return b"".join(_field(b"\x0a", pair))


def _decode_labels(encoded: bytes) -> tuple[Label, ...]:
    """Return the labels of which `_encode_labels` has made this."""
    labels = [dict(_fields(label)) for _, label in _fields(encoded)]
    return tuple([_label(of.get(b"\x0a", b"").decode(), of[b"\x12"].decode()) for of in labels])


def _fields(encoded: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the tags and values of what `_field` has written."""
    at = 0
    while at < len(encoded):
        tag, size, shift, is_more = encoded[at : at + 1], 0, 0, True
        while is_more:
            at += 1
            size |= (encoded[at] & 0x7F) << shift
            shift += 7
            is_more = encoded[at] > 0x7F  # noqa: PLR2004  # seven bits a byte
        at += 1
        yield tag, encoded[at : at + size]
        at += size


def _field(tag: bytes, value: bytes) -> tuple[bytes, ...]:
    """Return a field with a length; nothing where it is empty, as protobuf leaves it out."""
    return (tag, varint(len(value)), value) if value else ()
