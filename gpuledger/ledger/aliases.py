"""What an event reads under others' names: what these have in common.

A value is told once, so that no sum over a name counts twice: a GPU that is cut has no value of
which its instances have a part, and compute instances that share a memory tell of it once. Pure.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from gpuledger.ledger.families import Family, FamilyMetric
from gpuledger.ledger.series import SeriesGroup, SeriesValues
from gpuledger.records import GpuBooks, GpuEvent, GpuReading

Read = Callable[[GpuReading], float | None]
_Instance = tuple[str | None, int | None]
"""A GPU instance: its GPU and its number."""


NO_XIDS: Final[Mapping[str, int]] = MappingProxyType({})
"""Where nothing is known of XIDs."""


class AliasSeries(Protocol):
    """Makes the series of events under others' names."""

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of all series that it makes."""

    def values_of(
        self, event: GpuEvent, last_xids: Mapping[str, int] = NO_XIDS
    ) -> dict[SeriesGroup, SeriesValues]:
        """Return the values of each group; raises ValueError as `EventSeries.values_of` does.

        `last_xids` are those of the node's GPUs since its boot, by UUID.
        """


class AliasMetric(NamedTuple):
    """A metric of others, and what it reads."""

    metric: FamilyMetric
    read: Read


@dataclass(frozen=True, kw_only=True)
class AliasDevice:
    """A device of a tick, with what tells it from others."""

    books: GpuBooks
    parts: tuple[GpuReading, ...]
    """What its instances read, where it is a GPU that is cut."""
    is_split: bool
    """Whether it is one of several compute instances of a GPU instance."""
    tells_memory: bool
    """Whether it is the first of those that share its memory."""

    @property
    def reading(self) -> GpuReading:
        """What it read."""
        return self.books.reading

    def values(self, metrics: tuple[AliasMetric, ...]) -> SeriesValues:
        """Return the values of metrics; what instances have a part of they tell themselves."""
        return tuple(
            [
                None
                if any(one.read(part) is not None for part in self.parts)
                else one.read(self.reading)
                for one in metrics
            ]
        )


def alias_devices(event: GpuEvent) -> Iterator[AliasDevice]:
    """Yield the GPUs and MIG instances of an event."""
    siblings = Counter(_instance_of(books.reading) for books in event.gpus)
    told: set[_Instance] = set()
    for books in event.gpus:
        reading, instance = books.reading, _instance_of(books.reading)
        is_split = reading.parent_uuid is not None and siblings[instance] > 1
        yield AliasDevice(
            books=books,
            parts=tuple(
                one.reading for one in event.gpus if one.reading.parent_uuid == reading.uuid
            ),
            is_split=is_split,
            tells_memory=not is_split or instance not in told,
        )
        told.add(instance)


def _instance_of(reading: GpuReading) -> _Instance:
    return (reading.parent_uuid or reading.uuid, reading.gpu_instance)
