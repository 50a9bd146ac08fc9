"""One GPU of an open library, asked a group of questions at a time.

Whether a value can be true is judged elsewhere. Safe to ask different GPUs from different threads.
"""

from dataclasses import dataclass
from typing import Any

import pynvml

from agent.nvml.answers import CallGroup, GpuAnswers, LastSeen
from agent.nvml.asking import Asker
from agent.nvml.books import ask_books


@dataclass(kw_only=True)
class Gpu:
    """One GPU of an open library; what it does not support is asked once."""

    library: Any
    """The library that gave the handle."""
    handle: Any
    """The library's own handle."""
    uuid: str
    """Its identity."""
    index: int
    """The driver's index."""

    def __post_init__(self) -> None:
        self.asker = Asker(library=self.library, handle=self.handle)

    def answers_of(self, group: CallGroup, last_seen: LastSeen) -> dict[str, Any]:
        """Ask one group, by the fields of `GpuAnswers`.

        Raises NvmlLostError where the library must be started again.
        """
        if group is CallGroup.BOOKS:
            return ask_books(self.asker, last_seen)
        if group is CallGroup.READINGS:
            return self._readings()
        return {}

    def answer(self, last_seen: LastSeen) -> GpuAnswers:
        """Ask everything; raises NvmlLostError where the library must be started again."""
        given: dict[str, Any] = {}
        for group in CallGroup:
            given |= self.answers_of(group, last_seen)
        return GpuAnswers(uuid=self.uuid, index=self.index, **given)

    def _readings(self) -> dict[str, Any]:
        ask = self.asker.ask
        return {
            "temperature_celsius": ask("nvmlDeviceGetTemperature", pynvml.NVML_TEMPERATURE_GPU),
            "sm_clock_megahertz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_SM),
            "memory_clock_megahertz": ask("nvmlDeviceGetClockInfo", pynvml.NVML_CLOCK_MEM),
        }
