"""The chip's own counters of MIG instances: one pair of samples for each, as for a whole GPU.

A GPU instance that is one compute instance is sampled by the GPU's handle and its id; where it is
cut further, each compute instance by its own handle, as the whole would be counted to each.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agent.nvml.device import DeviceClient
from agent.nvml.gpm import Gpm
from agent.nvml.metric_specs import MEBIBYTES_PER_SECOND, MetricSpec
from agent.nvml.mig import InstanceClient


class InstanceCounters:
    """The counters of one GPU's instances."""

    def __init__(
        self,
        asker: DeviceClient,
        readings: Sequence[MetricSpec],
        *,
        monotonic_ns: Callable[[], int],
    ) -> None:
        self._asker = asker
        # By NVML's own words the links' flows are the GPU's: told of each instance they would be
        # counted once for each.
        self._readings = [one for one in readings if one.unit is not MEBIBYTES_PER_SECOND]
        self._monotonic_ns = monotonic_ns
        self._of: dict[tuple[str, bool], Gpm] = {}

    def ask(self, instances: Sequence[InstanceClient]) -> Mapping[str, Mapping[str, Any]]:
        """Return what `Gpm.ask` gives, by the instance's UUID; raises NvmlLostError."""
        if not instances and not self._of:
            return {}
        sizes = Counter(instance.identity.gpu_instance for instance in instances)
        wanted = {
            (one.identity.uuid, sizes[one.identity.gpu_instance] == 1): one for one in instances
        }
        for key in self._of.keys() - wanted.keys():
            self._of.pop(key).close()
        return {key[0]: self._gpm(key, instance).ask() for key, instance in wanted.items()}

    def close(self) -> None:
        """Free the buffers; the library must be open."""
        for gpm in self._of.values():
            gpm.close()
        self._of.clear()

    def _gpm(self, key: tuple[str, bool], instance: InstanceClient) -> Gpm:
        if key not in self._of:
            self._of[key] = self._open(instance, is_alone=key[1])
        return self._of[key]

    def _open(self, instance: InstanceClient, *, is_alone: bool) -> Gpm:
        number = instance.identity.gpu_instance if is_alone else None
        asker = instance.asker
        if number is not None:
            asker = DeviceClient(library=self._asker.library, handle=self._asker.handle)
        return Gpm(
            asker,
            self._readings,
            monotonic_ns=self._monotonic_ns,
            gpu_instance=number,
            whole=self._asker,
        )
