"""Where everything goes that the agent has to say: into the outbox, and onto the node's page."""

from dataclasses import dataclass

from agent.core.tick import NodeTick
from agent.exposition.node_state import NodeState
from agent.publishing.message_bundle import pack, pack_incident, pack_inventory
from agent.publishing.send_queue import SendQueue
from gpuledger.records import Incident, Inventory


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Both of them, as far as they are there."""

    outbox: SendQueue | None
    """What is to be published; `None` where nothing is."""
    view: NodeState | None
    """What `/metrics` shows; `None` where there is no page."""

    def tell_tick(self, tick: NodeTick) -> None:
        """Report of a tick."""
        if self.outbox:
            self.outbox.put(pack(tick))
        if self.view:
            self.view.show(tick.sample, tick.readings, processes=tick.processes)

    def tell_incident(self, incident: Incident) -> None:
        """Report of an incident."""
        if self.outbox:
            self.outbox.put(pack_incident(incident))
        if self.view:
            self.view.tell(incident)

    def tell_inventory(self, inventory: Inventory) -> None:
        """Report what the node is built of."""
        if self.outbox:
            self.outbox.put(pack_inventory(inventory))
        if self.view:
            self.view.equip(inventory)
