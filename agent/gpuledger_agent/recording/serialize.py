"""A value of the library as JSON and back: numbers, texts, structs, lists and handles.

A handle means nothing outside its process, so it is written as a number in the order of first
sight, and read back as a handle that this module made. A union is written by its bits, which any
of its members can be read from.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any, Final

import pynvml

Json = Any
_PLAIN: Final = (bool, int, str, type(None))
_POINTER: Final = "LP_"
# Addresses that are never followed: a handle is only given back to whoever gave it. Only pointers
# to what has no fields are made of them, as ctypes follows any other one that is read.
_FIRST_ADDRESS: Final = 0x10000
_FIRST_OTHER: Final = 1_000_000
_MAX_HANDLE: Final = 2**31
_OPAQUE: Final = frozenset(
    {
        "struct_c_nvmlComputeInstance_t",
        "struct_c_nvmlDevice_t",
        "struct_c_nvmlEventSet_t",
        "struct_c_nvmlGpmSample_t",
        "struct_c_nvmlGpuInstance_t",
        "struct_c_nvmlSystemEventSet_t",
    }
)
_MAX_DEPTH: Final = 16  # what the library answers has 6 levels at most
_TAGS: Final = (
    *((tag,) for tag in ("float", "ascii", "bytes", "tuple", "array", "object", "map")),
    ("struct", "fields"),
    ("handle",),
    ("handle", "of"),
)
_METRICS: Final = "c_nvmlGpmMetricsGet_t"
_ADDRESSES: Final = (ctypes.c_char_p, ctypes.c_void_p)  # of a pointer ctypes knows the kind itself
_METRIC_FIELDS: Final = ("metricId", "nvmlReturn", "value")


class Handles:
    """Which handle has which number; safe to use from several threads."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._made: dict[tuple[int, str | None], Any] = {}
        self._lock = threading.Lock()
        self._others = 0

    def number(self, handle: Any) -> int:  # noqa: ANN401  # the library's own
        """Return a handle's number, a new one at first sight."""
        if isinstance(handle, RecordedHandle):
            return handle.number
        with self._lock:
            return self._numbers.setdefault(_address(handle), len(self._numbers))

    def handle(self, number: int, kind: str | None) -> Any:  # noqa: ANN401  # as above
        """Return the handle in place of a recorded one."""
        with self._lock:
            known = self._made.get((number, kind))
            if known is None:
                known = self._made[number, kind] = _make_handle(number, kind)
                self._numbers[_address(known)] = number
            return known

    def another(self, kind: str | None) -> Any:  # noqa: ANN401  # as above
        """Return a handle that is none of the recorded ones."""
        with self._lock:
            self._others += 1
            made = _make_handle(_FIRST_OTHER + self._others, kind)
            self._numbers[_address(made)] = _FIRST_OTHER + self._others
        return made


class RecordedHandle:
    """Stands for a handle that was no pointer."""

    def __init__(self, number: int) -> None:
        self.number = number


def to_json(value: Any, handles: Handles) -> Json:  # noqa: ANN401, PLR0911  # a line a kind of value
    """Write a value; nothing is lost but what a pointer points to."""
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
        # The binding takes bytes for a text, which those of an identity need not be.
        return object.__getattribute__(struct, name)


def _metrics_fields(struct: Any, handles: Handles) -> dict[str, Json]:  # noqa: ANN401  # as above
    """Write only the metrics that are wanted, without the addresses of their names."""
    metrics = [
        {name: to_json(getattr(struct.metrics[index], name), handles) for name in _METRIC_FIELDS}
        for index in range(struct.numMetrics)
    ]
    samples = {name: to_json(getattr(struct, name), handles) for name in ("sample1", "sample2")}
    return {"version": struct.version, "metrics": metrics, **samples}


def from_json(value: Json, handles: Handles, move: Callable[[str, int], int]) -> Any:  # noqa: ANN401  # as written
    """Return a value; `move` makes of a struct's number, by its name, what it is to be now."""
    if isinstance(value, list):
        return [from_json(item, handles, move) for item in value]
    if not isinstance(value, dict):
        return value
    if tuple(value) not in _TAGS:
        raise ValueError(f"{{{', '.join(map(repr, value))}}} is no kind of value")
    kind, *_ = value
    return _READERS[kind](value, handles, move)


def build(value: Json) -> Any:  # noqa: ANN401  # as written
    """Return the value that was recorded; raises ValueError where it stands for nothing.

    A recording may come from anybody: whatever is built here without an error is built so when it
    is played.
    """
    _refuse_deep(value)
    # What a function wrote into is written as a reference to it.
    written = value.get("byref", value) if isinstance(value, dict) else value
    try:
        return from_json(written, Handles(), lambda _name, number: number)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _refuse_deep(value: Json, levels: int = _MAX_DEPTH) -> None:
    """Raise ValueError where lists and objects are nested deeper than in any answer."""
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise ValueError(f"more than {_MAX_DEPTH} levels of lists and objects")
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_deep(item, levels - 1)


def _read_struct(value: Json, handles: Handles, move: Callable[[str, int], int]) -> Any:  # noqa: ANN401  # as above
    name = value["struct"]
    struct: Any = getattr(pynvml, name, None) if isinstance(name, str) else None
    # The name is a stranger's: nothing else of the module may be called.
    is_struct = isinstance(struct, type) and issubclass(struct, ctypes.Structure)
    if not is_struct:
        raise ValueError(f"{name} is no struct of nvidia-ml-py")
    made = struct()
    if name == _METRICS:
        # The struct of a call says itself which metrics it wants; this one wants all recorded.
        metrics = value["fields"]["metrics"]
        made.numMetrics = len(metrics)
        for index, metric in enumerate(metrics):
            made.metrics[index].metricId = metric["metricId"]
    fill(made, value["fields"], handles, move)
    return made


def fill(
    struct: Any,  # noqa: ANN401  # as above
    fields: dict[str, Json],
    handles: Handles,
    move: Callable[[str, int], int],
) -> None:
    """Write recorded fields into a struct; one that it does not have is left out."""
    if type(struct).__name__ == _METRICS:
        _fill_metrics(struct, fields["metrics"])
        return
    for name, kind in ((name, kind) for name, kind, *_ in struct._fields_ if name in fields):
        written = fields[name]
        if isinstance(written, dict) and "bits" in written:
            # All members at once. Raises OverflowError where it has more bits than the union.
            union = getattr(struct, name)
            if not isinstance(union, ctypes.Union):
                raise ValueError(f"{name} is no union")
            size = ctypes.sizeof(union)
            ctypes.memmove(ctypes.byref(union), int(written["bits"]).to_bytes(size, "little"), size)
        elif isinstance(written, dict) and "fields" in written:
            fill(getattr(struct, name), written["fields"], handles, move)
        elif isinstance(written, dict) and "array" in written:
            _fill_array(getattr(struct, name), written["array"], handles, move)
        elif written is not None:
            # ctypes would follow it.
            if kind in _ADDRESSES:
                raise ValueError(f"{name} is an address")
            setattr(struct, name, _named(name, written, handles, move))


def _fill_metrics(struct: Any, metrics: list[dict[str, Json]]) -> None:  # noqa: ANN401  # as above
    """Fill the metrics that are wanted; one that was not recorded is refused."""
    recorded = {metric["metricId"]: metric for metric in metrics}
    for index in range(struct.numMetrics):
        slot = struct.metrics[index]
        found = recorded.get(slot.metricId)
        slot.nvmlReturn = found["nvmlReturn"] if found else pynvml.NVML_ERROR_NOT_SUPPORTED
        value = found["value"] if found else 0.0
        # NaN, which is no number of JSON, is written as a text.
        slot.value = float(value["float"]) if isinstance(value, dict) else value


def _fill_array(
    array: Any,  # noqa: ANN401  # as above
    items: list[Json],
    handles: Handles,
    move: Callable[[str, int], int],
) -> None:
    for index, item in enumerate(items):
        if isinstance(item, dict) and "fields" in item:
            fill(array[index], item["fields"], handles, move)
        elif item is not None:
            array[index] = from_json(item, handles, move)


def _named(name: str, value: Json, handles: Handles, move: Callable[[str, int], int]) -> Any:  # noqa: ANN401  # as above
    read = from_json(value, handles, move)
    return move(name, read) if type(read) is int else read


_READERS: Final[dict[str, Callable[[Json, Handles, Callable[[str, int], int]], Any]]] = {
    "float": lambda value, _handles, _move: float(value["float"]),
    "ascii": lambda value, _handles, _move: value["ascii"].encode("ascii"),
    "bytes": lambda value, _handles, _move: bytes.fromhex(value["bytes"]),
    "tuple": lambda value, handles, move: tuple(from_json(value["tuple"], handles, move)),
    "array": lambda value, handles, move: from_json(value["array"], handles, move),
    "handle": lambda value, handles, _move: handles.handle(value["handle"], value.get("of")),
    "struct": _read_struct,
    "map": lambda value, handles, move: {
        name: from_json(item, handles, move) for name, item in value["map"].items()
    },
    "object": lambda value, handles, move: pynvml.nvmlFriendlyObject(
        {name: _named(name, item, handles, move) for name, item in value["object"].items()}
    ),
}


def _is_pointer(value: Any) -> bool:  # noqa: ANN401  # any value
    return type(value).__name__.startswith(_POINTER)


def _address(handle: Any) -> Any:  # noqa: ANN401  # a key for a dictionary
    if not _is_pointer(handle):
        return handle
    return type(handle).__name__, ctypes.cast(handle, ctypes.c_void_p).value or 0


def _make_handle(number: int, kind: str | None) -> Any:  # noqa: ANN401  # the library's own
    if type(number) is not int or not 0 <= number < _MAX_HANDLE:
        raise ValueError(f"{number!r} is no handle's number")
    if kind is None:
        return RecordedHandle(number)
    if kind not in _OPAQUE:
        raise ValueError(f"{kind} is no handle of NVML")
    return ctypes.cast(_FIRST_ADDRESS + number, ctypes.POINTER(getattr(pynvml, kind)))


def is_handle(value: object) -> bool:
    """Return whether a value is a recorded handle."""
    return isinstance(value, RecordedHandle) or _is_pointer(value)
