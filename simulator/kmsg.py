"""The kernel's log of one node, with the driver's lines about XIDs, in `/dev/kmsg`'s form.

Reading starts at the log's end, as after a seek to it.
"""

from collections.abc import Sequence
from typing import Final

from gpuledger.clock import Clock
from simulator.identities import pci_bus_id
from simulator.incidents import PlannedIncident

_NS_PER_US: Final = 1_000
_KERNEL_WARNING: Final = 4


class SimulatedKmsg:
    """An open kernel log: each read gives one record."""

    def __init__(
        self, incidents: Sequence[PlannedIncident], *, clock: Clock, epoch_ns: int
    ) -> None:
        self._clock = clock
        self._epoch_ns = epoch_ns
        now_ns = clock.time_ns() - epoch_ns
        self._boot_ns = now_ns - clock.boottime_ns()
        self._lines = [
            one for one in incidents if one.spec.told_by != "nvml" and one.spec.xid is not None
        ]
        self._read = sum(one.time_ns < now_ns for one in self._lines)

    def read(self) -> bytes:
        """Return the next record; raises BlockingIOError where there is none yet."""
        if self._read >= len(self._lines):
            raise BlockingIOError
        one = self._lines[self._read]
        if one.time_ns > self._clock.time_ns() - self._epoch_ns:
            raise BlockingIOError
        self._read += 1
        stamp_us = (one.time_ns - self._boot_ns) // _NS_PER_US
        return f"{_KERNEL_WARNING},{1000 + self._read},{stamp_us},-;{_line(one)}\n".encode()

    def close(self) -> None:
        """Let go of the log."""


def _line(one: PlannedIncident) -> str:
    spec = one.spec
    bus = pci_bus_id(spec.gpu)[4:-2].lower()
    instance = "" if spec.gpu_instance is None else f" GPU-I:{spec.gpu_instance:02d}"
    if spec.compute_instance is not None:
        instance += f" GPU-CI:{spec.compute_instance:02d}"
    pid = "'<unknown>'" if spec.pid is None else str(spec.pid)
    return f"NVRM: Xid (PCI:{bus}{instance}): {spec.xid}, pid={pid}, name=<unknown>, {spec.text}"
