"""Queries the readings of one call group from one device, by NVML functions and numbered fields.

A plan lists the calls to make: each reading comes from the first of its sources that the device
supports, and readings that are parts of one answer share a call. The plan is rebuilt if the set of
unsupported calls changes, so a tick does not have to choose sources.

One call returns many numbered fields, each with its own return code. If an older driver does not
have a field, the whole call may fail. Each field is then queried separately, once. Before fields
that exist per NVLink are queried, the device is queried for its number of links.

`gpuledger_agent.core` decides which values are plausible.
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
"""The name of a field's reading. For a field of one link, also the link's number and, if the field
is an element of a list, the element's position."""
_CALL: Final = "nvmlDeviceGetFieldValues"
_MAX_FIELDS: Final = 128
"""Maximum number of fields per call. NVIDIA's tools query this many; more may not work."""
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
# An older driver answers with "invalid argument" for a field that it does not know.
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
    """A field to query, with the name of its reading."""

    name: Name
    key: _Key
    """The key in `DeviceClient.outcomes` if the field is refused."""
    answered_key: _Key
    """The key in `DeviceClient.outcomes` if the field is answered."""
    number: tuple[int, int]
    """The arguments for the driver: the field's id and the link."""
    member: str | None
    """The member of NVML's value union to read; `None` to read the member that the driver
    reports."""


# Cached, because all GPUs of a node have the same fields: hundreds, most of them per link.
@lru_cache(maxsize=2048)
def wanted_field(name: Name, field: FieldValue) -> WantedField:
    """Return a field of the catalogue converted for `FieldBatch`, with the name of its reading."""
    return WantedField(
        name=name,
        key=field.key,
        answered_key=field.answered_key,
        number=(field.number, field.scope),
        member=field.member,
    )


def value_name(value_type: int | None) -> str:
    """Return the member of NVML's union that holds a value of this type; `uiVal` if unknown."""
    return _VALUE_NAMES.get(value_type, "uiVal")


class FieldBatch:
    """Queries several numbered fields of a device in one call."""

    def __init__(self, client: DeviceClient, wanted: Sequence[WantedField]) -> None:
        self._client = client
        self._wanted = wanted
        self._numbers = [field.number for field in wanted]

    def query(self) -> dict[Name, Any]:
        """Return the values of the fields that the driver supports, by name.

        Raises `SourceLostError`.
        """
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
            # A field that the driver does not know may fail the whole call: try each one, once.
            return self.query_apart()
        self._client.outcomes[_CALL,] = None
        return values

    def query_apart(self) -> dict[Name, Any]:
        """Query each field in a separate call, and return the values by name.

        Fields that the driver refuses are marked as unsupported. Raises `SourceLostError`.
        """
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
    """Mark a query as unsupported if `error` means that the driver refused it.

    `error` must come from a separate call for this query. Other errors are ignored, because a later
    query may succeed.
    """
    code = getattr(error.__cause__, "value", None)
    if code in _REFUSALS:
        client.mark_unsupported(key, reason_of(error))


def check_code(
    client: DeviceClient, key: _Key, code: int, *, answered_key: _Key | None = None
) -> bool:
    """Return whether the return code of one value in a call's answer means success.

    If the code means that the driver refuses the value, the client marks `key` as unsupported. If
    it means success, the client records `answered_key` as answered, which defaults to `key`. Raises
    `GpuLostError`.
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
        # This is not a refusal, so the next tick may succeed.
        NVML_ERRORS.labels(call=label, error=name).inc()
    return False


_COUNT: Final = FieldValue(pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT)


class Links:
    """The NVLinks of one GPU; their numbers start at 0."""

    def __init__(self, client: DeviceClient) -> None:
        self._client = client
        self._batch = FieldBatch(client, [wanted_field("count", _COUNT)])
        self._is_known = False
        self.numbers = range(0)
        """The GPU's link numbers; empty until they are known."""

    def update(self) -> bool:
        """Query the number of links, unless the driver has already answered or refused.

        Return whether the number has changed. Raises `SourceLostError`.
        """
        was_queried = _COUNT.key in self._client.outcomes
        # After MIG is turned on or off, the client has no outcomes, so the number is queried again.
        if was_queried and (self._is_known or self._client.is_unsupported(_COUNT.key)):
            return False
        # `query` is not used, because a refusal would mark all fields as unsupported.
        count, before = self._batch.query_apart().get("count"), self.numbers
        if isinstance(count, int) and 0 <= count <= pynvml.NVML_NVLINK_MAX_LINKS:
            self.numbers, self._is_known = range(count), True
        return self.numbers != before


_Wanted = list[tuple[str, Callable[[Any], Any]]]


class QueryPlan:
    """Queries a call group's readings from one device, except readings of the chip's counters."""

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
        """Return the values that the driver supports, by name of the reading.

        Raises `SourceLostError`.
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
        # If a source was refused in this tick, the next tick queries the reading's next source.
        if self._client.support_version != self._support_version:
            self._merge_refusals()
            self._plan()
        return values

    def _merge_refusals(self) -> None:
        """If every link refuses a field, replace the links' outcomes by one, to save memory."""
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
        """Choose each reading's first source that the driver has not refused; merge equal calls."""
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
                # A single link, such as an unused one, may refuse a field that others answer.
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
    """Add a field's value to the answer, `values`.

    The values of a reading's links become one mapping by link number.
    """
    if isinstance(field, str):
        values[field] = value
        return
    name, link, position = field
    by_link = values.setdefault(name, {})
    if position is None:
        by_link[link] = value
        return
    # The list ends before the first missing value, because positions identify values.
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
    """Return 1 if any feature is licensed, otherwise 0; `None` if licensing is not supported."""
    if not features.isGridLicenseSupported:
        return None
    # Only the first `count` elements of the array are valid.
    count = features.licensableFeaturesCount
    return int(any(feature.featureState for feature in features.gridLicensableFeatures[:count]))
