"""Converts values of pynvml to JSON and back: numbers, texts, structs, lists and handles.

Handles are written as numbers in the order of their first use, and read back as new handles of the
same type. A union is written as bits, because any of its members may be read.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, Final

import pynvml

Json = Any
Move = Callable[[str, int], int]
"""Takes a field's name and its recorded number; returns the number to use in the replay."""
_PLAIN: Final = (bool, int, str, type(None))
_POINTER: Final = "LP_"
# These addresses are never dereferenced: the replay gets back the handles that it returned.
_FIRST_ADDRESS: Final = 0x10000
_FIRST_OTHER: Final = 1_000_000
_METRICS: Final = "c_nvmlGpmMetricsGet_t"
_METRIC_FIELDS: Final = ("metricId", "nvmlReturn", "value")


class RecordedHandle:
    """The handle that a replay returns for a recorded handle that was not a pointer."""

    def __init__(self, number: int) -> None:
        self.number = number


class Handles:
    """Maps handles to numbers and back; may be used from several threads."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._made: dict[tuple[int, str | None], Any] = {}
        self._lock = threading.Lock()
        self._others = 0

    def number(self, handle: Any) -> int:  # noqa: ANN401  # the library's own
        """Return a handle's number; a handle that was not seen before gets a new number."""
        if isinstance(handle, RecordedHandle):
            return handle.number
        with self._lock:
            return self._numbers.setdefault(_address(handle), len(self._numbers))

    def handle(self, number: int, kind: str | None) -> Any:  # noqa: ANN401  # as above
        """Return the handle for a recorded number.

        `kind` is the name of the struct to which the handle points; `None` if the handle is not a
        pointer.
        """
        with self._lock:
            known = self._made.get((number, kind))
            if known is None:
                known = self._made[number, kind] = self._make(number, kind)
            return known

    def another(self, kind: str | None) -> Any:  # noqa: ANN401  # as above
        """Return a new handle, different from all recorded handles; `kind` is as in `handle`."""
        with self._lock:
            self._others += 1
            return self._make(_FIRST_OTHER + self._others, kind)

    def _make(self, number: int, kind: str | None) -> Any:  # noqa: ANN401  # as above
        if kind is None:
            return RecordedHandle(number)
        pointer = ctypes.cast(_FIRST_ADDRESS + number, ctypes.POINTER(getattr(pynvml, kind)))
        self._numbers[_address(pointer)] = number
        return pointer


def to_json(value: Any, handles: Handles) -> Json:  # noqa: ANN401, PLR0911  # a line a kind of value
    """Return a value of pynvml as JSON; the data to which pointers point is not included."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, bytes):
        is_text = value.isascii() and value.decode("ascii").isprintable()
        return {"ascii": value.decode("ascii")} if is_text else {"bytes": value.hex()}
    if isinstance(value, list | tuple):
        written = [to_json(item, handles) for item in value]
        return written if isinstance(value, list) else {"tuple": written}
    if isinstance(value, dict):
        return {"map": {name: to_json(item, handles) for name, item in value.items()}}
    if isinstance(value, pynvml.nvmlFriendlyObject):
        return {"object": {name: to_json(item, handles) for name, item in vars(value).items()}}
    return _ctypes_to_json(value, handles)


def _ctypes_to_json(value: Any, handles: Handles) -> Json:  # noqa: ANN401, PLR0911  # a line a kind
    if type(value).__name__ == "CArgObject":
        return {"byref": to_json(value._obj, handles)}  # noqa: SLF001  # ctypes has no other way
    if isinstance(value, ctypes.Structure):
        if type(value).__name__ == _METRICS:
            fields = _metrics_fields(value, handles)
        else:
            fields = {name: to_json(_member(value, name), handles) for name, *_ in value._fields_}
        return {"struct": type(value).__name__, "fields": fields}
    if isinstance(value, ctypes.Union):
        return {"bits": int.from_bytes(bytes(value), "little")}
    if isinstance(value, ctypes.Array):
        return {"array": [to_json(item, handles) for item in value]}
    if isinstance(value, ctypes._SimpleCData):  # noqa: SLF001  # the base of all of ctypes' numbers
        return to_json(value.value, handles)
    if _is_pointer(value):
        kind = type(value).__name__.removeprefix(_POINTER)
        return {"handle": handles.number(value), "of": kind} if value else None
    return {"handle": handles.number(value)}


def _member(struct: Any, name: str) -> Any:  # noqa: ANN401  # as above
    try:
        return getattr(struct, name)
    except UnicodeDecodeError:
        # The binding decodes bytes as text, but an identity may consist of any bytes.
        return object.__getattribute__(struct, name)


def _metrics_fields(struct: Any, handles: Handles) -> dict[str, Json]:  # noqa: ANN401  # as above
    """Return the fields of a GPM metrics struct as JSON, with only the requested metrics.

    The addresses of the metrics' names are left out.
    """
    metrics = [
        {name: to_json(getattr(struct.metrics[index], name), handles) for name in _METRIC_FIELDS}
        for index in range(struct.numMetrics)
    ]
    samples = {name: to_json(getattr(struct, name), handles) for name in ("sample1", "sample2")}
    return {"version": struct.version, "metrics": metrics, **samples}


def from_json(value: Json, handles: Handles, move: Move) -> Any:  # noqa: ANN401, PLR0911  # a line a kind
    """Return the value that `to_json` has converted to JSON; `move` adapts recorded times."""
    match value:
        case list(items) | {"array": items}:
            return [from_json(item, handles, move) for item in items]
        case {"tuple": items}:
            return tuple(from_json(item, handles, move) for item in items)
        case {"float": text}:
            return float(text)
        case {"ascii": text}:
            return text.encode("ascii")
        case {"bytes": text}:
            return bytes.fromhex(text)
        case {"handle": number}:
            return handles.handle(number, value.get("of"))
        case {"map": items}:
            return {name: from_json(item, handles, move) for name, item in items.items()}
        case {"object": items}:
            parts = {name: _named(name, item, handles, move) for name, item in items.items()}
            return pynvml.nvmlFriendlyObject(parts)
        case {"struct": name, "fields": fields}:
            return _read_struct(name, fields, handles, move)
        case _:
            return value


def _read_struct(name: str, fields: dict[str, Json], handles: Handles, move: Move) -> Any:  # noqa: ANN401  # as above
    struct = getattr(pynvml, name)()
    if name == _METRICS:
        # Request all recorded metrics.
        struct.numMetrics = len(fields["metrics"])
        for index, metric in enumerate(fields["metrics"]):
            struct.metrics[index].metricId = metric["metricId"]
    fill(struct, fields, handles, move)
    return struct


def fill(struct: Any, fields: dict[str, Json], handles: Handles, move: Move) -> None:  # noqa: ANN401  # as above
    """Copy recorded fields into a struct; fields that were not recorded keep their values."""
    if type(struct).__name__ == _METRICS:
        _fill_metrics(struct, fields["metrics"])
        return
    for name in (name for name, *_ in struct._fields_ if name in fields):
        match fields[name]:
            case {"bits": bits}:
                union = getattr(struct, name)
                size = ctypes.sizeof(union)
                ctypes.memmove(ctypes.byref(union), bits.to_bytes(size, "little"), size)
            case {"fields": inner}:
                fill(getattr(struct, name), inner, handles, move)
            case {"array": items}:
                _fill_array(getattr(struct, name), items, handles, move)
            case None:
                pass
            case written:
                setattr(struct, name, _named(name, written, handles, move))


def _fill_metrics(struct: Any, metrics: list[dict[str, Json]]) -> None:  # noqa: ANN401  # as above
    """Write the recorded values into a GPM metrics struct, for the metrics that it requests.

    Requested metrics that were not recorded get the code for an unsupported metric.
    """
    recorded = {metric["metricId"]: metric for metric in metrics}
    for index in range(struct.numMetrics):
        slot = struct.metrics[index]
        found = recorded.get(slot.metricId)
        slot.nvmlReturn = found["nvmlReturn"] if found else pynvml.NVML_ERROR_NOT_SUPPORTED
        value = found["value"] if found else 0.0
        # JSON has no NaN.
        slot.value = float(value["float"]) if isinstance(value, dict) else value


def _fill_array(array: Any, items: list[Json], handles: Handles, move: Move) -> None:  # noqa: ANN401  # as above
    for index, item in enumerate(items):
        if isinstance(item, dict) and "fields" in item:
            fill(array[index], item["fields"], handles, move)
        elif item is not None:
            array[index] = from_json(item, handles, move)


def _named(name: str, value: Json, handles: Handles, move: Move) -> Any:  # noqa: ANN401  # as above
    read = from_json(value, handles, move)
    return move(name, read) if type(read) is int else read


def _is_pointer(value: Any) -> bool:  # noqa: ANN401  # any value
    return type(value).__name__.startswith(_POINTER)


def _address(handle: Any) -> Any:  # noqa: ANN401  # a key for a dictionary
    if not _is_pointer(handle):
        return handle
    return type(handle).__name__, ctypes.cast(handle, ctypes.c_void_p).value or 0
