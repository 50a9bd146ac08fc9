"""Encodes samples as remote-write requests of version 1.0 or 2.0.

Protobuf is encoded by hand. A labelled object, such as a GPU or a pod, has fixed labels and a known
set of metrics. Both are encoded once (`LabelSet`, `Metric`) and combined into series. Version 1.0
writes the labels of each series in full. Version 2.0 writes each string of a request once and
refers to it by position (`_Symbols`), so that references must be made for each request. The
receiver's version may become known only after ticks were split into requests. Samples are therefore
kept as `SampleGroup` and encoded when they are sent.

This module defines only the encoding, which tests compare with protobuf. `active_series` decides
which series exist and when they end; `write_client` interprets responses. Pure.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

Labels = Iterable[tuple[str, str]]
encode_value: Final[Callable[[float], bytes]] = struct.Struct("<d").pack
STALE_VALUE: Final = bytes.fromhex("020000000000f07f")
"""The NaN 0x7ff0000000000002, which marks the end of a series; as bytes, because arithmetic and
JSON lose it."""
NO_START: Final = b""
"""The encoded start of a series without a start, or whose start is unknown."""
_FIRST_MS: Final = 1 << 35
_VALUE_BYTES: Final = 8
_TIME_BYTES: Final = 7
"""Size of a time with its field tag; the same for a start."""
_LAST_MS: Final = (1 << 42) - 1
_NAME: Final = b"__name__"
# The bytes before a sample's value: the sample's tag and length, and the value's tag (64-bit).
_SAMPLE: Final = b"\x12\x10\x09"
_SAMPLE_WITH_START: Final = b"\x12\x17\x09"
# The enumeration is the same in both versions; other kinds are sent as unknown.
_KINDS: Final = {"counter": 1, "gauge": 2}
_UNITS: Final = (
    "byte_seconds",  # listed before `seconds`, which also matches
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
    """Encode a non-negative integer as a protobuf varint; raises ValueError for a negative one."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  # seven bits a byte
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def encode_time(time_ms: int) -> bytes:
    """Encode the field that follows a sample's value: its time in milliseconds since the epoch.

    Raises ValueError before 1971-02-02 and after 2109-05-15, because the encoded lengths assume a
    time of 7 bytes.
    """
    return b"\x10" + _six_bytes(time_ms)


def encode_start(start_ms: int | None) -> bytes:
    """Encode a counter's start in milliseconds since the epoch; raises like `encode_time`."""
    return NO_START if start_ms is None else b"\x18" + _six_bytes(start_ms)


def is_encodable(time_ms: int) -> bool:
    """Return whether `encode_time` can encode a time in milliseconds since the epoch."""
    return _FIRST_MS <= time_ms <= _LAST_MS


def _six_bytes(time_ms: int) -> bytes:
    if not is_encodable(time_ms):
        raise ValueError(f"time_ns: {time_ms} ms since the epoch is not between 1971 and 2109")
    return varint(time_ms)


class Metric:
    """A metric's name and metadata."""

    __slots__ = ("help", "kind", "label", "name", "unit")

    def __init__(
        self,
        *,
        name: str,
        kind: str,
        help: str,  # noqa: A002  # Prometheus' term
    ) -> None:
        """Take the name and metadata; the unit is derived from the end of the name."""
        self.name, self.kind, self.help = name, kind, help
        base = name.removesuffix("_total")
        self.unit = next((unit for unit in _UNITS if base.endswith(f"_{unit}")), "")
        self.label = _encode_label(_NAME, name.encode())
        """The name encoded as a label for 1.0."""


class Label:
    """A label's name and value, shared by all series that have it."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: str) -> None:
        """Take the name and value as sent."""
        self.name, self.value = name, value


_HeldLabels = tuple[Label, ...] | bytes
"""Labels as objects, or encoded for 1.0. The encoded labels after the name end with `_SAMPLE`."""


@lru_cache(maxsize=1024)
def _label(name: str, value: str) -> Label:
    # A node's series begin together and share most labels, so sharing objects saves memory and
    # time.
    return Label(name, value)


class LabelSet:
    """The labels of one labelled object, which all its series share, without `__name__`.

    Kept in the form of the version in which they were sent last: as objects for 2.0, or encoded for
    1.0. The encoding is more than half of a series' memory.
    """

    __slots__ = ("after", "before")

    def __init__(self, labels: Labels) -> None:
        """Sort labels by name and leave out empty values: the protocol requires both.

        Raises ValueError for duplicate names, and for text that is not valid UTF-8.
        """
        # Sorted by bytes, as receivers compare names. Prometheus treats an empty label as missing.
        present = sorted((name.encode(), name, value) for name, value in labels if value)
        names = [name for name, _, _ in present]
        if len(set(names)) != len(names) or _NAME in names:
            raise ValueError(f"duplicate label in {[name.decode() for name in names]}")
        "".join(value for _, _, value in present).encode()
        self.before: _HeldLabels = tuple([_label(*pair) for name, *pair in present if name < _NAME])
        """The labels sorted before `__name__`, as objects or encoded."""
        self.after: _HeldLabels = tuple([_label(*pair) for name, *pair in present if name > _NAME])
        """The labels sorted after `__name__`, as objects or encoded."""

    @property
    def size_bytes(self) -> int:
        """The total length of names and values in characters; the same for each protocol."""
        return sum(len(one.name) + len(one.value) for part in self._as_labels() for one in part)

    def around_name(self) -> tuple[tuple[Label, ...], tuple[Label, ...]]:
        """Return the labels sorted before and after `__name__`."""
        before, after = self.before, self.after
        if isinstance(before, bytes) or isinstance(after, bytes):
            before, after = self.before, self.after = self._as_labels()
        return before, after

    def encoded(self) -> tuple[bytes, bytes]:
        """Return the 1.0 encoding of the labels before and after the name, and keep this form."""
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
    """The metrics of a group that have a sample; groups with the same metrics share one object."""

    __slots__ = ("bits", "metrics")

    def __init__(self, metrics: Iterable[Metric], *, bits: int = 0) -> None:
        """Take the metrics, in the order of their samples.

        `bits` has a bit for the position of each metric in its family; the lowest bit is for the
        first position.
        """
        self.metrics, self.bits = tuple(metrics), bits


class SampleGroup(NamedTuple):
    """The series of one labelled object that have a sample at one time."""

    labels: LabelSet
    metrics: MetricSet
    starts: Sequence[bytes] | None = None
    """The start of each metric's series, encoded by `encode_start` and never `NO_START`; `None` if
    no metric has a start."""


class TimedSamples(NamedTuple):
    """The samples of one time."""

    time: bytes
    """Encoded by `encode_time`."""
    groups: Sequence[SampleGroup]
    values: Sequence[bytes]
    """The value of each metric of each group, encoded by `encode_value`, or STALE_VALUE."""


def encode_request(version: Version, samples: Iterable[TimedSamples]) -> bytes:
    """Return the uncompressed body of a request; the order of the series does not change."""
    return _encode_v2(samples) if version is Version.V2 else _encode_v1(samples)


def encode_metadata(metrics: Iterable[Metric]) -> bytes:
    """Return the metadata of metrics for a 1.0 request; it may follow the samples."""
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
            # Checked here, because a call for each group would take a twentieth of the time.
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
                # The hot path: a series has five parts, and all except its value are shared with
                # other series.
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
    """The strings of one 2.0 request in order, each with its encoded reference."""

    def __init__(self) -> None:
        super().__init__()
        self[""] = varint(0)  # always the first

    def __missing__(self, symbol: str) -> bytes:
        reference = self[symbol] = varint(len(self))
        return reference


class _ReferredLabels(dict[Label, bytes]):
    """The encoded reference of each label in one 2.0 request."""

    def __init__(self, symbols: _Symbols) -> None:
        super().__init__()
        self._symbols = symbols

    def __missing__(self, label: Label) -> bytes:
        referred = self[label] = self._symbols[label.name] + self._symbols[label.value]
        return referred


class _ReferredSets(dict[LabelSet, tuple[bytes, bytes]]):
    """The encoded references of labels before and after the name in one 2.0 request."""

    def __init__(self, referred: _ReferredLabels) -> None:
        super().__init__()
        self._refer = referred.__getitem__

    def __missing__(self, labels: LabelSet) -> tuple[bytes, bytes]:
        before, after = labels.around_name()
        found = b"".join(map(self._refer, before)), b"".join(map(self._refer, after))
        self[labels] = found
        return found


class _DescribedMetrics(dict[Metric, tuple[bytes, bytes]]):
    """For each metric in one 2.0 request: the encoded reference to its name, and its metadata."""

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
    """For each metric of a set, the first and the last part of its series in 2.0.

    The first part ends after the name, and the last part is the metadata. Groups with the same key
    differ only in the part in between. The key consists of the metrics, the references of the
    labels before the name, the number of bytes between the name and the value, and whether samples
    have a start.
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
    """Return the beginning of each metric's series in 1.0, and the metric's name as a label.

    `labels_bytes` is the size of the other labels and `_SAMPLE`.
    """
    return [
        (_head_v1(labels_bytes + len(metric.label)), metric.label) for metric in metric_set.metrics
    ]


@lru_cache(maxsize=4096)
def _head_v1(labels_bytes: int) -> bytes:
    """Return the beginning of a series in 1.0.

    `labels_bytes` is the size of its labels and `_SAMPLE`.
    """
    return b"\x0a" + varint(labels_bytes + _VALUE_BYTES + _TIME_BYTES)


@lru_cache(maxsize=4096)
def _head_v2(refs_bytes: int, rest_bytes: int) -> bytes:
    """Return the beginning of a series in 2.0.

    `refs_bytes` is the size of its references; `rest_bytes` is the size of start and metadata.
    """
    refs = varint(refs_bytes)
    sample_bytes = len(_SAMPLE) + _VALUE_BYTES + _TIME_BYTES
    size = 1 + len(refs) + refs_bytes + sample_bytes + rest_bytes
    return b"".join((b"\x2a", varint(size), b"\x0a", refs))


@lru_cache(maxsize=4096)
def _encode_symbol(symbol: str) -> bytes:
    # Encoded even if it is empty, because the first symbol is empty.
    text = symbol.encode()
    return b"".join((b"\x22", varint(len(text)), text))


def _encode_labels(labels: Iterable[Label]) -> bytes:
    return b"".join(_encode_label(one.name.encode(), one.value.encode()) for one in labels)


def _encode_label(name: bytes, value: bytes) -> bytes:
    pair = b"".join((*_field(b"\x0a", name), *_field(b"\x12", value)))
    return b"".join(_field(b"\x0a", pair))


def _decode_labels(encoded: bytes) -> tuple[Label, ...]:
    """Return the labels encoded by `_encode_labels`."""
    labels = [dict(_fields(label)) for _, label in _fields(encoded)]
    return tuple([_label(of.get(b"\x0a", b"").decode(), of[b"\x12"].decode()) for of in labels])


def _fields(encoded: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the tags and values encoded by `_field`."""
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
    """Return the parts of a field; none for an empty value, which protobuf omits."""
    return (tag, varint(len(value)), value) if value else ()
