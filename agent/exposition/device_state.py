"""What was last read of one device, each part with its own age. How old is too old, `view` says."""

from dataclasses import dataclass, field
from typing import Any, Final

from agent.exposition.rates import NvlinkRates
from gpuledger.records import GpuDetails, GpuReading

_FAST_PARTS: Final = ("profiling", "traffic", "throttling")
_SLOW_PARTS: Final = ("health", "limits")


@dataclass(slots=True)
class DeviceState:
    """One device, its parts by name, each with the time at which it was read."""

    reading: GpuReading
    details: GpuDetails | None
    seen_ns: int
    parts: dict[str, tuple[int, Any]] = field(default_factory=dict)
    rates: NvlinkRates = field(default_factory=NvlinkRates)

    def take(self, reading: GpuReading, details: GpuDetails | None, now_ns: int) -> None:
        """Take what a tick says; a part that it does not have stays as it was."""
        self.reading, self.details, self.seen_ns = reading, details, now_ns
        for name in (*_FAST_PARTS, *_SLOW_PARTS):
            part = getattr(details, name, None)
            if part is not None:
                self.parts[name] = (now_ns, part)
        if details:
            self.rates.update(details.traffic, details.health, at_ns=now_ns)

    def fresh_parts(self, *, fast_ns: int, slow_ns: int) -> dict[str, Any]:
        """Return the parts that were read since `fast_ns`, or `slow_ns` where they are rare."""
        return {
            name: part
            for name, (read_ns, part) in self.parts.items()
            if read_ns >= (slow_ns if name in _SLOW_PARTS else fast_ns)
        }


def place(reading: GpuReading) -> tuple[int, int, int]:
    """Return where a device stands: by the GPU's index, behind it its instances."""
    if reading.parent_uuid is None:
        return reading.index, -1, -1
    return reading.index, reading.gpu_instance or 0, reading.compute_instance or 0
