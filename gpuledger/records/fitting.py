"""Cuts a record to the bounds of its fields and of a message, for data that comes from others.

A driver, a kubelet or an API server may report more than a record can carry. The excess is cut off:
the end of a text, the last items of a list. The code is pure; the caller counts and reports the
cuts. `fit` reads the whole record, so call it only for records that validation rejected. Call
`fit_bytes` only for records that are too large for a message.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from functools import cache
from itertools import accumulate, islice
from operator import is_
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from gpuledger.codec import encode
from gpuledger.records.base import BaseRecord
from gpuledger.records.processes import ProcessExit
from gpuledger.records.samples import GpuProcess, NodeSample

T = TypeVar("T")
P = TypeVar("P", GpuProcess, ProcessExit)
Cut = Counter[str]
"""The cuts in each field, such as `GpuReading.model`: the number of texts that were cut, or of list
items that were cut off."""


def fit(record: T) -> tuple[T, Cut]:
    """Return the record with all texts and lists within their bounds, and the cuts made.

    In a tick, processes are dropped if the device or container that they refer to was cut off. If
    allocations were cut off, `allocations_unknown` is set.
    """
    fitting = _Fitting()
    return fitting.consistent(fitting.record(record)), +fitting.cut


def fit_bytes(record: T, *, max_bytes: int) -> tuple[T, Cut]:
    """Return the record with its lists cut to `max_bytes` of JSON in total, and the cuts made.

    All lists share the available bytes equally; a list that needs less leaves the rest to the
    others. Each item stays whole. A tick stays consistent, as with `fit`.
    """
    fitting = _Fitting()
    return fitting.consistent(fitting.record_in_bytes(record, max_bytes)), +fitting.cut


_MARK_BYTES: Final = len('"allocations_unknown":true,')
"""Size of the field that `consistent` may add after lists were cut."""


class _Fitting:
    """Cuts one record, part by part; parts that are within their bounds are returned unchanged."""

    def __init__(self) -> None:
        self.cut: Cut = Counter()

    def record(self, record: Any) -> Any:  # noqa: ANN401  # any record
        changed = {
            name: fitted
            for name, hint in _hints(cast("Any", type(record))).items()
            if (value := getattr(record, name)) is not None
            and (fitted := self._value(value, hint, f"{type(record).__name__}.{name}")) is not value
        }
        return msgspec.structs.replace(record, **changed) if changed else record

    def record_in_bytes(self, record: Any, max_bytes: int) -> Any:  # noqa: ANN401  # any record
        """Return the record with its lists cut, so that its JSON has at most `max_bytes`."""
        lists = {
            name: value
            for name in record.__struct_fields__
            if isinstance(value := getattr(record, name), list)
        }
        # In a list, each item takes one byte more, for its comma.
        sizes = {name: [len(encode(item)) + 1 for item in items] for name, items in lists.items()}
        empty = msgspec.structs.replace(record, **{name: [] for name in lists})
        left_bytes = max_bytes - len(encode(empty)) - _MARK_BYTES
        kept: dict[str, Any] = {}
        for number, name in enumerate(sorted(lists, key=lambda name: sum(sizes[name]))):
            share_bytes = left_bytes // (len(lists) - number)
            ends = list(accumulate(sizes[name]))
            kept[name] = lists[name][: bisect_right(ends, share_bytes)]
            self.cut[f"{type(record).__name__}.{name}"] += len(ends) - len(kept[name])
            left_bytes -= sum(sizes[name][: len(kept[name])])
        return msgspec.structs.replace(record, **kept)

    def consistent(self, record: Any) -> Any:  # noqa: ANN401  # any record
        """Return the record; in a tick, mark missing allocations and drop misplaced processes."""
        if not isinstance(record, NodeSample):
            return record
        if self.cut["NodeSample.allocations"] or self.cut["NodeSample.job_allocations"]:
            record = msgspec.structs.replace(record, allocations_unknown=True)
        # Processes point to devices and containers by position, which may now be past the list's
        # end.
        return self.keep_placed(record)

    def keep_placed(self, sample: NodeSample) -> NodeSample:
        """Return a tick without the processes whose device or container was cut off."""
        return msgspec.structs.replace(
            sample,
            processes=self._placed(sample.processes, sample, "NodeSample.processes"),
            ended_processes=sample.ended_processes
            and self._placed(sample.ended_processes, sample, "NodeSample.ended_processes"),
        )

    def _value(self, value: Any, hint: Any, name: str) -> Any:  # noqa: ANN401  # any value and type
        kind, max_length = _bound_of(hint)
        if isinstance(value, str | list | dict):
            over = 0 if max_length is None else max(0, len(value) - max_length)
            # A long text counts once, a long list by its excess items.
            self.cut[name] += min(1, over) if isinstance(value, str) else over
        if isinstance(value, str):
            return value[:max_length]
        if isinstance(value, list):
            (inner,) = get_args(kind)
            items = [self._value(item, inner, name) for item in value[:max_length]]
            is_same = len(items) == len(value) and all(map(is_, items, value))
            return value if is_same else items
        if isinstance(value, dict):
            of_key, of_value = get_args(kind)
            entries = {
                self._value(key, of_key, name): self._value(item, of_value, name)
                for key, item in islice(value.items(), max_length)
            }
            return value if entries == value else entries
        return self.record(value) if isinstance(value, BaseRecord) else value

    def _placed(self, processes: list[P], sample: NodeSample, name: str) -> list[P]:
        gpus, containers = len(sample.gpus), len(sample.containers)
        placed = [
            process
            for process in processes
            if process.gpu < gpus and (process.container is None or process.container < containers)
        ]
        self.cut[name] += len(processes) - len(placed)
        return placed


@cache
def _hints(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401  # mypy takes a class for unhashable
    """Return the types of a record's fields."""
    return get_type_hints(cls, include_extras=True)


def _bound_of(hint: Any) -> tuple[Any, int | None]:  # noqa: ANN401  # any type annotation
    """Return the type without its constraints, and the maximum length of its values."""
    if get_origin(hint) in (Union, UnionType):
        # An optional field: the bound is on its value.
        (present,) = (part for part in get_args(hint) if part is not NoneType)
        return _bound_of(present)
    if get_origin(hint) is Annotated:
        kind, *limits = get_args(hint)
        return kind, next((limit.max_length for limit in limits if limit.max_length), None)
    return hint, None
