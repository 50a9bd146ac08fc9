"""What the node is built of now, as the driver said last. It asks nobody.

Here ids and addresses find their GPU, and the inventory is made.
"""

from collections.abc import Mapping

from agent.kubelet.devices import DeviceIndex
from agent.nvml.driver import NodeFacts
from gpuledger.records import Inventory


class Hardware:
    """The GPUs of one node."""

    def __init__(self, *, node: str, boot_id: str) -> None:
        self._node = node
        self._boot_id = boot_id
        self._buses: dict[str, str] = {}
        self.devices = DeviceIndex()
        """The GPUs and instances to which ids may lead."""

    def buses(self) -> Mapping[str, str]:
        """Give the GPUs' UUIDs by PCI address."""
        return self._buses

    def take(self, facts: NodeFacts, *, time_ns: int) -> Inventory:
        """Take in what has changed; gives the record that tells of it."""
        self.devices = DeviceIndex.of(facts.gpus)
        self._buses = {gpu.pci_bus_id: gpu.uuid for gpu in facts.gpus if gpu.pci_bus_id}
        return Inventory(
            node=self._node,
            boot_id=self._boot_id,
            time_ns=time_ns,
            gpus=list(facts.gpus),
            **facts.versions,
        )
