"""A GPU or a MIG instance as the node knows it now, and how a table's path reads a value of it.

Here live the values that are made of two readings, and how a value of a record becomes a number of
DCGM's: MiB, percent, MHz, mJ, ns. Which readings are too old is decided in `node_state`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from agent.exposition.gpu_events import GpuEventHistory, NvlinkRates, nvlink_link_bytes_totals
from gpuledger.records import (
    GpuDetails,
    GpuFacts,
    GpuHealth,
    GpuLimits,
    GpuProfiling,
    GpuReading,
    GpuThrottling,
    GpuTraffic,
    Inventory,
)

_RECOVERY_CODES: Final = {
    "none": 0,
    "reset": 1,
    "reboot": 2,
    "drain_p2p": 3,
    "drain_and_reset": 4,
}
Converted = float | str | None
Unit = Callable[[Any], Converted]


def unit_of(name: str) -> Unit:
    """Return the conversion that a table names; raises KeyError where there is none."""
    kind, _, argument = name.partition(" ")
    if kind == "link":
        return lambda values: values.get(argument)
    if kind == "item":
        index = int(argument)
        return lambda values: values[index] if index < len(values) else None
    return UNITS[name]


UNITS: Final[dict[str, Unit]] = {
    "": lambda value: int(value) if isinstance(value, bool) else value,
    "MiB": lambda value: value // (1 << 20),
    "%": lambda value: round(value * 100, 4),
    "MHz": lambda value: value // 1_000_000,
    "mJ": lambda value: round(value * 1e3),
    "ns": lambda value: round(value * 1e9),
    "recovery": _RECOVERY_CODES.get,
    "text": str,
    "multi_series": lambda value: value,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDevice:
    """All that is known of one device; a part is absent where it is not known, or no more."""

    reading: GpuReading
    """The newest reading."""
    details: GpuDetails | None = None
    """What else was read in the same tick; its parts stand below, as each has its own age."""
    profiling: GpuProfiling | None = None
    """The newest of the chip's own counters."""
    traffic: GpuTraffic | None = None
    """The newest byte counters."""
    throttling: GpuThrottling | None = None
    """The newest throttling."""
    health: GpuHealth | None = None
    """The newest health."""
    limits: GpuLimits | None = None
    """The newest limits."""
    facts: GpuFacts | None = None
    """What is built into the GPU, or into the GPU of which this is an instance."""
    node: Inventory | None = None
    """What the node is built of."""
    events: GpuEventHistory | None = None
    """What happened to the GPU; absent on an instance."""
    rates: NvlinkRates | None = None
    """How fast the counters of its NVLinks rise."""
    is_silent: bool = False
    """Whether the GPU does not answer any more, so that nothing stands in the other parts but what
    is built into it and what happened to it."""
    is_lost: bool = False
    """Whether the driver has lost it."""

    @property
    def gpu_uuid(self) -> str:
        """The UUID of the GPU that this is, or of which this is an instance."""
        return self.reading.parent_uuid or self.reading.uuid


Read = Callable[[ShownDevice], Converted]


def read_at(path: str, unit: str = "") -> Read:
    """Make a function that reads `part.field` of a device; `None` where it is absent.

    Raises KeyError for a unit or a derived value that there is none of.
    """
    part_name, _, name = path.partition(".")
    convert = unit_of(unit)
    if part_name == "derived":
        part_of: Callable[[ShownDevice], Any] = lambda device: device  # noqa: E731  # one of two
        get: Callable[[Any], Any] = DERIVED[name]
    else:
        part_of, get = attrgetter(part_name), attrgetter(name)

    def read(device: ShownDevice) -> Converted:
        part = part_of(device)
        value = None if part is None else get(part)
        return None if value is None else convert(value)

    return read


_FABRIC_CODES: Final = {"not_supported": 0, "not_started": 1, "in_progress": 2}
_FABRIC_SUCCESS: Final = 3
_FABRIC_FAILURE: Final = 4


class Derived:
    """Values that no record has: each is made of several."""

    @staticmethod
    def memory_free_bytes(device: ShownDevice) -> int | None:
        """Return what is neither in use nor the driver's reserve."""
        reading = device.reading
        if reading.memory_total_bytes is None or reading.memory_used_bytes is None:
            return None
        reserved = reading.memory_reserved_bytes or 0
        return max(0, reading.memory_total_bytes - reading.memory_used_bytes - reserved)

    @staticmethod
    def memory_used_ratio(device: ShownDevice) -> float | None:
        """Return the part in use of what can be used."""
        free, used = Derived.memory_free_bytes(device), device.reading.memory_used_bytes
        return None if not used or free is None else used / (used + free)

    @staticmethod
    def nvlink_rate(device: ShownDevice) -> float | None:
        """Return the rate over all links, as long as the counters are still read."""
        return device.rates.total if device.rates and device.traffic else None

    @staticmethod
    def nvlink_link_rates(device: ShownDevice) -> Mapping[str, float | None]:
        """Return the rate over each link that is still read, by the link's number."""
        rates = device.rates.links if device.rates else {}
        return {link: rates.get(link) for link in nvlink_link_bytes_totals(device.health)}

    @staticmethod
    def vgpu_license_status(device: ShownDevice) -> int | None:
        """Return 0 where nothing can be licensed, as DCGM does; absent where no health was read."""
        return None if device.health is None else device.health.vgpu_license_status or 0

    @staticmethod
    def fabric_code(device: ShownDevice) -> int | None:
        """Return DCGM's number of how far the registration with the fabric is."""
        health = device.health
        if health is None or health.fabric_state is None:
            return None
        if health.fabric_state == "completed":
            return _FABRIC_FAILURE if health.fabric_status else _FABRIC_SUCCESS
        return _FABRIC_CODES.get(health.fabric_state)


DERIVED: Final[dict[str, Callable[[ShownDevice], float | Mapping[str, float | None] | None]]] = {
    "memory_free_bytes": Derived.memory_free_bytes,
    "memory_used_ratio": Derived.memory_used_ratio,
    "nvlink_rate": Derived.nvlink_rate,
    "nvlink_link_rates": Derived.nvlink_link_rates,
    "vgpu_license_status": Derived.vgpu_license_status,
    "fabric_code": Derived.fabric_code,
}
"""What makes a value, by the path in a table."""
