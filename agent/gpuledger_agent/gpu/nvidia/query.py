"""A group of the catalogue queried of one device: its functions, and its numbered fields at once.

A plan says which calls to make: each reading comes from the first of its sources that the device
supports, and readings that are parts of one answer share the call. It is laid out again whenever
what is unsupported changes, so a tick looks nothing up.

Many numbered fields come by one call, each with a return code of its own. One number that an older
driver does not know may fail the whole call; then each is queried alone, once. Before the fields of
each link, the device is queried for how many links it has. Whether a value can be true is decided
in `gpuledger_agent.core`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import pynvml

from gpuledger.errors import UnavailableError
from gpuledger_agent.gpu.nvidia.catalogue import EACH_LINK, FieldValue, FunctionCall, MetricSpec
from gpuledger_agent.gpu.nvidia.device_client import (
    DeviceClient,
    call_nvml,
    error_name,
    raw_getattr,
    reason_of,
)
from gpuledger_agent.gpu.nvidia.library import LicensableFeatures, NvmlLibrary
from gpuledger_agent.gpu.protocol import FailedError, GpuLostError, UnsupportedError
from gpuledger_agent.metrics import NVML_ERRORS

_Key = tuple[object, ...]
Name = str | tuple[str, int, int | None]
"""Ours of a field; where it is of one link with the link's number, and where it is one of several
in a row with its position."""
_CALL: Final = "nvmlDeviceGetFieldValues"
_MAX_FIELDS: Final = 128
"""Of one call: what NVIDIA's own tools ask for together, and more, is not known to work."""
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


class WantedField(NamedTuple):
    """A field under our name."""

    name: Name
    key: _Key
    """By which a refusal is remembered."""
    answered_key: _Key
    """By which an answer is remembered."""
    number: tuple[int, int]
    """What is passed to the driver: the field's id, and the link."""
    member: str | None
    """The member of the union that has the value; `None` where the driver says which."""


# The GPUs of a node have the same fields: hundreds, where each of their links has its own.
@lru_cache(maxsize=2048)
def wanted_field(name: Name, field: FieldValue) -> WantedField:
    """Return what a batch needs of a field."""
    return WantedField(
        name=name,
        key=field.key,
        answered_key=field.answered_key,
        number=(field.number, field.scope),
        member=field.member,
    )


def value_name(value_type: int | None) -> str:
    """Return the member of the union that holds a value of this type."""
    return _VALUE_NAMES.get(value_type, "uiVal")


class FieldBatch:
    """Fields that are queried together."""

    def __init__(self, client: DeviceClient, wanted: Sequence[WantedField]) -> None:
        self._client = client
        self._wanted = wanted
        self._numbers = [field.number for field in wanted]

    def query(self) -> dict[Name, Any]:
        """Return the values of the fields that the driver supports; raises SourceLostError."""
        if not self._numbers or self._client.is_unsupported((_CALL,)):
            return {}
        try:
            values = self._query(self._wanted, self._numbers)
        except UnsupportedError as error:
            self._client.mark_unsupported((_CALL,), reason_of(error))
            return {}
        except FailedError:
            known = self._client.outcomes.keys()
            if all(field.key in known or field.answered_key in known for field in self._wanted):
                return {}
            # One number that is unknown to the driver may have cost all: each is tried alone, once.
            return self.query_apart()
        self._client.outcomes[_CALL,] = None
        return values

    def query_apart(self) -> dict[Name, Any]:
        """Query each in a call of its own, so that a refusal is its own; raises SourceLostError."""
        values: dict[Name, Any] = {}
        for field in self._wanted:
            try:
                values |= self._query([field], [field.number])
            except (UnsupportedError, FailedError) as error:
                mark_if_unsupported(self._client, field.key, error)
        return values

    def _query(
        self, wanted: Sequence[WantedField], numbers: Sequence[tuple[int, int]]
    ) -> dict[Name, Any]:
        values: dict[Name, Any] = {}
        function = NvmlLibrary.nvmlDeviceGetFieldValues
        structs = call_nvml(self._client.library, function, self._client.handle, numbers)
        for field, struct in zip(wanted, structs, strict=False):
            code = raw_getattr(struct, "nvmlReturn")
            if check_code(self._client, field.key, code, answered_key=field.answered_key):
                member = field.member or value_name(raw_getattr(struct, "valueType"))
                values[field.name] = getattr(raw_getattr(struct, "value"), member)
        return values


def mark_if_unsupported(client: DeviceClient, key: _Key, error: UnavailableError) -> None:
    """Mark a reading as unsupported where it was queried alone and refused.

    What only failed may succeed later.
    """
    code = getattr(error.__cause__, "value", None)
    if code in _REFUSALS:
        client.mark_unsupported(key, reason_of(error))


def check_code(
    client: DeviceClient, key: _Key, code: int, *, answered_key: _Key | None = None
) -> bool:
    """Return whether a code inside a successful answer is success; raises SourceLostError.

    A refusal is remembered by `key`, an answer by `answered_key` where that is another one.
    """
    if code == _SUCCESS:
        client.outcomes.setdefault(answered_key or key, None)
        return True
    label, name = ":".join(map(str, key)), error_name(pynvml.NVMLError(code))
    if code in _LOST:
        raise GpuLostError(f"{label}: {name}")
    if code in _REFUSALS:
        client.mark_unsupported(key, name)
    else:
        # It may be there at the next tick, so it is no refusal.
        NVML_ERRORS.labels(call=label, error=name).inc()
    return False


_COUNT: Final = FieldValue(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


class Links:
    """The NVLinks of one GPU; their numbers begin at 0."""

    def __init__(self, client: DeviceClient) -> None:
        self._client = client
        self._batch = FieldBatch(client, [wanted_field("count", _COUNT)])
        self._is_known = False
        self.numbers = range(0)
        """Those that it has, as far as is known."""

    def update(self) -> bool:
        """Query where it is not known; return whether it changed. Raises SourceLostError."""
        was_queried = _COUNT.key in self._client.outcomes
        # Again after MIG was turned on or off: the client has forgotten what was queried.
        if was_queried and (self._is_known or self._client.is_unsupported(_COUNT.key)):
            return False
        # Not as other fields are: a whole call that is refused would refuse all of them.
        count, before = self._batch.query_apart().get("count"), self.numbers
        if isinstance(count, int) and 0 <= count <= pynvml.NVML_NVLINK_MAX_LINKS:
            self.numbers, self._is_known = range(count), True
        return self.numbers != before


_Wanted = list[tuple[str, Callable[[Any], Any]]]


class QueryPlan:
    """The calls for one group of readings of one device."""

    def __init__(self, client: DeviceClient, specs: Sequence[MetricSpec]) -> None:
        self._client = client
        self._specs = specs
        has_links = any(
            isinstance(source, FieldValue) and source.link == EACH_LINK
            for spec in specs
            for source in spec.sources
        )
        self._links = Links(client) if has_links else None
        self._plan()

    def query(self) -> dict[str, Any]:
        """Return the values that the driver supports, by the names of the readings.

        Raises SourceLostError.
        """
        if self._links and self._links.update():
            self._plan()
        values: dict[str, Any] = {}
        for call, wanted in self._calls:
            if call.fills:
                answer = self._client.fill(call.name, call.fills)
            else:
                answer = self._client.query_key(call.key)
            if answer is not None:
                for name, extract in wanted:
                    values[name] = extract(answer)
        for batch in self._batches:
            for field, value in batch.query().items():
                _put(values, field, value)
        # Something was refused in this tick: from the next one on its second source is queried.
        if self._client.support_version != self._support_version:
            self._merge_refusals()
            self._plan()
        return values

    def _merge_refusals(self) -> None:
        """Remember once what each link refused: a GPU may refuse a field of hundreds of links."""
        each_link = [
            (spec.name, source)
            for spec in self._specs
            for source in spec.sources
            if isinstance(source, FieldValue) and source.link == EACH_LINK
        ]
        links = self._links.numbers if self._links else ()
        for name, source in each_link:
            for fields in zip(
                *(_fields_of_link(name, source, link) for link in links), strict=True
            ):
                keys = [field.key for field in fields]
                self._client.merge_refusals(keys, fields[0].answered_key)

    def _plan(self) -> None:
        """Choose the sources that are not unsupported, and each call once."""
        self._support_version = self._client.support_version
        is_unsupported = self._client.is_unsupported
        calls: dict[tuple[object, ...], tuple[FunctionCall, _Wanted]] = {}
        fields: list[WantedField] = []
        for spec in self._specs:
            possible = (source for source in spec.sources if not is_unsupported(source.key))
            source = next(possible, None)
            if isinstance(source, FunctionCall):
                wanted = (spec.name, _extractor(source))
                calls.setdefault(source.key, (source, []))[1].append(wanted)
            elif isinstance(source, FieldValue) and source.link != EACH_LINK:
                fields.append(wanted_field(spec.name, source))
            elif isinstance(source, FieldValue):
                links = self._links.numbers if self._links else ()
                # One link may refuse what the others answer, as one that is not in use.
                fields += [
                    field
                    for link in links
                    for field in _fields_of_link(spec.name, source, link)
                    if not is_unsupported(field.key) and not is_unsupported(field.answered_key)
                ]
        self._calls = list(calls.values())
        self._batches = [
            FieldBatch(self._client, fields[start : start + _MAX_FIELDS])
            for start in range(0, len(fields), _MAX_FIELDS)
        ]


@lru_cache(maxsize=1024)
def _fields_of_link(name: str, source: FieldValue, link: int) -> tuple[WantedField, ...]:
    if source.count is None:
        return (wanted_field((name, link, None), source.of(link)),)
    return tuple(
        wanted_field((name, link, position), source.of(link, position=position))
        for position in range(source.count)
    )


def _put(values: dict[str, Any], field: Name, value: object) -> None:
    """Put a field's value into the answer: what comes of each link is one mapping by its number."""
    if isinstance(field, str):
        values[field] = value
        return
    name, link, position = field
    by_link = values.setdefault(name, {})
    if position is None:
        by_link[link] = value
        return
    # A list ends before the first that is missing, as a position says what it is.
    in_a_row = by_link.setdefault(link, [])
    if len(in_a_row) == position:
        in_a_row.append(value)


def _extractor(call: FunctionCall) -> Callable[[Any], Any]:
    if call.name == "nvmlDeviceGetGridLicensableFeatures_v4":
        return _license_status
    if isinstance(call.part, int):
        return itemgetter(call.part)
    return attrgetter(call.part) if call.part else lambda answer: answer


def _license_status(features: LicensableFeatures) -> int | None:
    """Return 1 where any licensed feature is licensed, `None` where none can be."""
    if not features.isGridLicenseSupported:
        return None
    # The array has room for more features than there are.
    count = features.licensableFeaturesCount
    return int(any(feature.featureState for feature in features.gridLicensableFeatures[:count]))
