"""A producer that keeps its messages, and fails as often as a test sets."""

from collections.abc import Sequence

from gpuledger.bus.protocol import Message
from gpuledger.errors import BusUnavailableError


class KeepingProducer:
    """Keeps published batches; the first `refusals` calls raise as if no broker were available."""

    def __init__(self, *, refusals: int = 0) -> None:
        self.batches: list[tuple[str, int, list[Message]]] = []
        self._refusals = refusals

    async def publish(self, topic: str, partition: int, messages: Sequence[Message]) -> None:
        """Keep the batch, or raise."""
        if self._refusals:
            self._refusals -= 1
            raise BusUnavailableError("no broker answers")
        self.batches.append((topic, partition, list(messages)))

    def messages(self) -> list[Message]:
        """Return all kept messages in their order."""
        return [message for _, _, batch in self.batches for message in batch]
