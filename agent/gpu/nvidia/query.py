"""A group of the catalogue put to one device: all its calls, and its numbered fields in one call.

Each reading is asked for by the first of its questions that the device supports. Before the first
field of each link, the device is asked how many links it has, in a call of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

import pynvml

from agent.gpu.nvidia.catalogue import EACH_LINK, FieldValue, FunctionCall, MetricSpec, Source
from agent.gpu.nvidia.client import DeviceClient, call_nvml, raw_getattr, reason_of
from agent.gpu.nvidia.library import LicensableFeatures, NvmlLibrary
from agent.gpu.source import FailedError, GpuLostError, UnsupportedError
from agent.metrics import NVML_ERRORS
from gpuledger.errors import UnavailableError

_Key = tuple[object, ...]
Name = str | tuple[str, int]
"""Ours of a field, with the link's number where it is of one link."""
_CALL: Final = "nvmlDeviceGetFieldValues"
_SUCCESS: Final = pynvml.NVML_SUCCESS
_VALUE_NAMES: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
# A number that an older driver does not know is an invalid argument to it.
_REFUSALS: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
_LOST: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


def value_name(value_type: int | None) -> str:
    """Return the member of the union that holds a value of this type."""
    return _VALUE_NAMES.get(value_type, "uiVal")


class FieldBatch:
    """Fields that are asked together."""

    def __init__(self, client: DeviceClient, wanted: Sequence[tuple[Name, FieldValue]]) -> None:
        """`wanted` are fields by our names."""
        self._client = client
        self._wanted = [(name, field.key) for name, field in wanted]
        self._numbers = [(field.number, field.scope) for _, field in wanted]

    def ask(self) -> dict[Name, Any]:
        """Return those that the driver gives; raises SourceLostError."""
        if not self._numbers or self._client.is_unsupported((_CALL,)):
            return {}
        try:
            given = self._ask(self._wanted, self._numbers)
        except UnsupportedError as error:
            self._client.mark_unsupported((_CALL,), reason_of(error))
            return {}
        except FailedError:
            if all(key in self._client.outcomes for _, key in self._wanted):
                return {}
            # One number that is unknown to the driver may have cost all: each is tried alone, once.
            return self.ask_apart()
        self._client.outcomes[_CALL,] = None
        return given

    def ask_apart(self) -> dict[Name, Any]:
        """Try each in a call of its own, whose refusal is its own; raises SourceLostError."""
        given: dict[Name, Any] = {}
        for one, number in zip(self._wanted, self._numbers, strict=True):
            try:
                given |= self._ask([one], [number])
            except (UnsupportedError, FailedError) as error:
                mark_if_unsupported(self._client, one[1], error)
        return given

    def _ask(
        self, wanted: Sequence[tuple[Name, _Key]], numbers: Sequence[tuple[int, int]]
    ) -> dict[Name, Any]:
        given = {}
        function = NvmlLibrary.nvmlDeviceGetFieldValues
        values = call_nvml(self._client.library, function, self._client.handle, numbers)
        for (name, key), value in zip(wanted, values, strict=False):
            if check_code(self._client, key, raw_getattr(value, "nvmlReturn")):
                member = value_name(raw_getattr(value, "valueType"))
                given[name] = getattr(raw_getattr(value, "value"), member)
        return given


def mark_if_unsupported(client: DeviceClient, key: _Key, error: UnavailableError) -> None:
    """Remember that one of many was refused, asked alone; what only failed may come yet."""
    code = getattr(error.__cause__, "value", None)
    if code in _REFUSALS:
        client.mark_unsupported(key, reason_of(error))


def check_code(client: DeviceClient, key: _Key, code: int) -> bool:
    """Return whether a code inside a successful answer is success; raises SourceLostError."""
    if code == _SUCCESS:
        client.outcomes.setdefault(key, None)
        return True
    label = ":".join(map(str, key))
    if code in _LOST:
        raise GpuLostError(f"{label}: {_name_of(code)}")
    if code in _REFUSALS:
        client.mark_unsupported(key, _name_of(code))
    else:
        NVML_ERRORS.labels(call=label, error=_name_of(code)).inc()
    return False


def _name_of(code: int) -> str:
    return type(pynvml.NVMLError(code)).__name__.removeprefix("NVMLError_")


_COUNT: Final = FieldValue(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


class Links:
    """The NVLinks of one GPU; their numbers begin at 0."""

    def __init__(self, client: DeviceClient) -> None:
        self._client = client
        self._batch = FieldBatch(client, [("count", _COUNT)])
        self._is_known = False
        self.numbers = range(0)
        """Those that it has, as far as is known."""

    def look(self) -> bool:
        """Ask where it is not known; tells whether they are others now. Raises SourceLostError."""
        is_asked = _COUNT.key in self._client.outcomes
        if is_asked and (self._is_known or self._client.is_unsupported(_COUNT.key)):
            return False
        # Not as other fields are: a whole call that is refused would refuse all of them.
        count, before = self._batch.ask_apart().get("count"), self.numbers
        if isinstance(count, int) and 0 <= count <= pynvml.NVML_NVLINK_MAX_LINKS:
            self.numbers, self._is_known = range(count), True
        return self.numbers != before


_LICENSES: Final = "nvmlDeviceGetGridLicensableFeatures_v4"
_Wanted = list[tuple[str, Callable[[Any], Any]]]


class QueryPlan:
    """One group's questions to one device."""

    def __init__(self, client: DeviceClient, readings: Sequence[MetricSpec]) -> None:
        self._client = client
        self._readings = readings
        asked = (question for reading in readings for question in reading.asked)
        self._links = Links(client) if any(map(_is_of_each_link, asked)) else None
        self._plan()

    def ask(self) -> dict[str, Any]:
        """Return the driver's values by our names, those that it gives; raises SourceLostError."""
        if self._links and self._links.look():
            self._plan()
        given: dict[str, Any] = {}
        for call, wanted in self._calls:
            answer = _put(self._client, call)
            if answer is not None:
                for name, take in wanted:
                    given[name] = take(answer)
        given |= _gather(self._fields.ask())
        if self._client.support_version != self._support_version:
            self._plan()
        return given

    def _plan(self) -> None:
        """Lay out the questions that are not refused, each call once."""
        self._support_version = self._client.support_version
        calls: dict[tuple[object, ...], tuple[FunctionCall, _Wanted]] = {}
        fields: list[tuple[Name, FieldValue]] = []
        for reading in self._readings:
            question = self._question(reading)
            if isinstance(question, FunctionCall):
                calls.setdefault(question.key, (question, []))[1].append(
                    (reading.name, _taker(question))
                )
            elif isinstance(question, FieldValue):
                fields += self._fields_of(reading.name, question)
        self._calls = list(calls.values())
        self._fields = FieldBatch(self._client, fields)

    def _fields_of(self, name: str, field: FieldValue) -> Iterator[tuple[Name, FieldValue]]:
        if field.link != EACH_LINK:
            yield name, field
            return
        for link in self._links.numbers if self._links else ():
            if not self._client.is_unsupported(field.of(link).key):
                yield (name, link), field.of(link)

    def _question(self, reading: MetricSpec) -> Source | None:
        possible = (one for one in reading.asked if not self._client.is_unsupported(one.key))
        return next(possible, None)


def _is_of_each_link(question: Source) -> bool:
    return isinstance(question, FieldValue) and question.link == EACH_LINK


def _gather(given: dict[Name, Any]) -> dict[str, Any]:
    """Make mappings, by the link's number, of what was asked of each link."""
    gathered: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(name, str):
            gathered[name] = value
        else:
            gathered.setdefault(name[0], {})[name[1]] = value
    return gathered


def _put(client: DeviceClient, call: FunctionCall) -> object | None:
    if call.fills:
        return client.fill(call.name, call.fills)
    return client.ask_by_name(call.name, *call.arguments)


def _taker(call: FunctionCall) -> Callable[[Any], Any]:
    if call.name == _LICENSES:
        return _license_status
    if isinstance(call.part, int):
        return itemgetter(call.part)
    return attrgetter(call.part) if call.part else _whole


def _whole(answer: object) -> object:
    return answer


def _license_status(features: LicensableFeatures) -> int | None:
    """Return 1 where any licensed feature is licensed, `None` where none can be."""
    if not features.isGridLicenseSupported:
        return None
    count = features.licensableFeaturesCount
    return int(any(one.featureState for one in features.gridLicensableFeatures[:count]))
