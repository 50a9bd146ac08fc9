"""The chip's own counters of MIG instances: one pair of samples for each, as for a whole GPU.

A GPU instance that is one compute instance is sampled by the GPU's handle and its id; where it is
cut further, each compute instance by its own handle, as the whole would be counted to each.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.nvml.asking import Asker
from agent.nvml.gpm import Gpm
from agent.nvml.mig import Instance
from agent.nvml.questions import Reading


class InstanceCounters:
    """The counters of one GPU's instances."""

    def __init__(
        self, asker: Asker, readings: Sequence[Reading], *, monotonic_ns: Callable[[], int]
    ) -> None:
        self._asker = asker
        self._readings = readings
        self._monotonic_ns = monotonic_ns
        self._of: dict[str, Gpm] = {}

    def ask(self, instances: Sequence[Instance]) -> Mapping[str, Mapping[str, Any]]:
        """Give what `Gpm.ask` gives, by the instance's UUID; raises NvmlLostError."""
        if not instances and not self._of:
            return {}
        sizes = Counter(instance.identity.gpu_instance for instance in instances)
        for uuid in self._of.keys() - {instance.identity.uuid for instance in instances}:
            self._of.pop(uuid).close()
        return {instance.identity.uuid: self._gpm(instance, sizes).ask() for instance in instances}

    def close(self) -> None:
        """Free the buffers; the library must be open."""
        for gpm in self._of.values():
            gpm.close()
        self._of.clear()

    def _gpm(self, instance: Instance, sizes: Mapping[int | None, int]) -> Gpm:
        gpm = self._of.get(instance.identity.uuid)
        if gpm is None:
            gpm = self._of[instance.identity.uuid] = self._open(instance, sizes)
        return gpm

    def _open(self, instance: Instance, sizes: Mapping[int | None, int]) -> Gpm:
        number = instance.identity.gpu_instance
        is_whole = number is not None and sizes[number] == 1
        return Gpm(
            Asker(library=self._asker.library, handle=self._asker.handle)
            if is_whole
            else instance.asker,
            self._readings,
            monotonic_ns=self._monotonic_ns,
            gpu_instance=number if is_whole else None,
        )
