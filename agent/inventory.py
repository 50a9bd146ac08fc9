"""What the node is built of now, as the driver said last. It asks nobody.

Here ids of devices find their GPU, and the inventory is made.
"""

from agent.core.raw import NodeFacts
from agent.host.kubelet.assignments import DeviceIndex
from gpuledger.records import Inventory


class InventoryTracker:
    """The GPUs of one node."""

    def __init__(self, *, node: str, boot_id: str) -> None:
        self._node = node
        self._boot_id = boot_id
        self.devices = DeviceIndex()
        """The GPUs and instances to which ids may lead."""

    def take(self, facts: NodeFacts, *, time_ns: int) -> Inventory:
        """Take in what has changed; gives the record that tells of it."""
        self.devices = DeviceIndex.of(facts.gpus)
        return Inventory(
            node=self._node,
            boot_id=self._boot_id,
            time_ns=time_ns,
            gpus=list(facts.gpus),
            **facts.versions,
        )
