"""A group of the catalogue put to one device: all its calls, and its numbered fields in one call.

Each reading is asked for by the first of its questions that the device supports. Before the first
field of each link, the device is asked how many links it has, in a call of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Any, Final

from agent.nvml.device import DeviceClient
from agent.nvml.fields import FieldBatch, Name
from agent.nvml.links import Links
from agent.nvml.metric_specs import EACH_LINK, FieldValue, FunctionCall, MetricSpec, Source

_LICENSES: Final = "nvmlDeviceGetGridLicensableFeatures_v4"
_Wanted = list[tuple[str, Callable[[Any], Any]]]


class QueryPlan:
    """One group's questions to one device."""

    def __init__(self, asker: DeviceClient, readings: Sequence[MetricSpec]) -> None:
        self._asker = asker
        self._readings = readings
        asked = (question for reading in readings for question in reading.asked)
        self._links = Links(asker) if any(map(_is_of_each_link, asked)) else None
        self._plan()

    def ask(self) -> dict[str, Any]:
        """Return the driver's values by our names, those that it gives; raises NvmlLostError."""
        if self._links and self._links.look():
            self._plan()
        given: dict[str, Any] = {}
        for call, wanted in self._calls:
            answer = _put(self._asker, call)
            if answer is not None:
                for name, take in wanted:
                    given[name] = take(answer)
        given |= _gather(self._fields.ask())
        if self._asker.refusals != self._refusals:
            self._plan()
        return given

    def _plan(self) -> None:
        """Lay out the questions that are not refused, each call once."""
        self._refusals = self._asker.refusals
        calls: dict[tuple[Any, ...], tuple[FunctionCall, _Wanted]] = {}
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
        self._fields = FieldBatch(self._asker, fields)

    def _fields_of(self, name: str, field: FieldValue) -> Iterator[tuple[Name, FieldValue]]:
        if field.link != EACH_LINK:
            yield name, field
            return
        for link in self._links.numbers if self._links else ():
            if not self._asker.is_refused(field.of(link).key):
                yield (name, link), field.of(link)

    def _question(self, reading: MetricSpec) -> Source | None:
        possible = (one for one in reading.asked if not self._asker.is_refused(one.key))
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


def _put(asker: DeviceClient, call: FunctionCall) -> Any:  # noqa: ANN401  # as the library has it
    if call.fills:
        return asker.fill(call.name, call.fills)
    return asker.ask(call.name, *call.arguments)


def _taker(call: FunctionCall) -> Callable[[Any], Any]:
    if call.name == _LICENSES:
        return _license_status
    if isinstance(call.part, int):
        return itemgetter(call.part)
    return attrgetter(call.part) if call.part else _whole


def _whole(answer: Any) -> Any:  # noqa: ANN401  # as the library has it
    return answer


def _license_status(features: Any) -> int | None:  # noqa: ANN401  # a ctypes struct
    """Return 1 where any licensed feature is licensed, `None` where none can be."""
    if not features.isGridLicenseSupported:
        return None
    count = features.licensableFeaturesCount
    return int(any(one.featureState for one in features.gridLicensableFeatures[:count]))
