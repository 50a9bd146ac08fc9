"""The contract of a redelivery: events handed once more to the one receiver that refused them.

`gpuledger dead-letters replay` opens one. It has the settings of the kind's sink and none of its
state: it joins no group, commits nothing, and what it hands over begins and ends nothing that the
running sink goes on with.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol

from gpuledger.bus.protocol import Record
from gpuledger.clock import Clock
from gpuledger.records import GpuEvent
from gpuledger.runtime import Readiness

Refusals = Sequence[str | None]
"""For each record of a batch why it was refused, in words; `None` where the receiver has it."""


class RefusedEvent(NamedTuple):
    """An event, and the record in which its sink read it first."""

    record: Record
    event: GpuEvent


class Redelivery(Protocol):
    """Hands refused events to one receiver."""

    receiver: str
    """Where they go, for people: an address without its secrets."""
    max_batch: int
    """The most events of one call."""

    async def deliver(self, batch: Sequence[RefusedEvent]) -> Refusals:
        """Return once the receiver has taken or refused each event.

        Raises ReceiverUnavailableError or BusError where that is not known of any: the same batch
        is to be tried again, and what it had taken of it may come twice.
        """


class OpenRedelivery(Protocol):
    """Opens the redelivery of one kind of sink: the function `open_redelivery` of its module."""

    def __call__(
        self,
        *,
        bus: Any,  # noqa: ANN401  # a Bus, as OpenSink has it
        settings: Any,  # noqa: ANN401  # the kind's section
        readiness: Readiness,
        clock: Clock,
    ) -> AbstractAsyncContextManager[Redelivery]:
        """Return the redelivery, open while the context is."""
