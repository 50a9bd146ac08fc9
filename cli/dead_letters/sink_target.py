"""Puts back what a sink refused: to its receiver, by the settings of that sink.

Written back to its topic, an event would come to every sink once more. A receiver of alerts gets
nothing: it is told of the present, and what was true then may be over.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from typing_extensions import override

from cli.dead_letters.letter_filter import KeptLetter
from cli.dead_letters.letter_target import LetterTarget, Usable, usable
from gpuledger.bus.protocol import Bus
from gpuledger.clock import Clock
from gpuledger.errors import UserError
from gpuledger.runtime import Readiness
from gpuledger.topics import Topic
from sinks.redelivery import Redelivery, Refusals, RefusedEvent
from sinks.registry import KINDS, SinkKind


def replayed_kind(name: str) -> SinkKind:
    """Return the kind of sink to whose receiver letters go; raises UserError for one that is none.

    Also for one that tells of the present alone.
    """
    able = {each.name: each for each in KINDS.values() if each.redelivery}
    if name not in able:
        why = (
            "an alert or an incident of then is not sent now"
            if name in KINDS
            else f"there is no sink {name!r}"
        )
        raise UserError(f"--sink: {why}; give one of {', '.join(able)}")
    return able[name]


@asynccontextmanager
async def open_sink_target(
    kind: SinkKind,
    *,
    bus: Bus,
    settings: Any,  # noqa: ANN401  # the kind's section
    group: str,
    readiness: Readiness,
    clock: Clock,
) -> AsyncIterator["SinkTarget"]:
    """Open what hands letters of the group to the receiver that its settings name."""
    async with kind.load_redelivery()(
        bus=bus, settings=settings, readiness=readiness, clock=clock
    ) as redelivery:
        yield SinkTarget(redelivery, consumer=group, topics=[bus.topics.events])


class SinkTarget(LetterTarget):
    """Hands events to the receiver of a sink."""

    def __init__(self, redelivery: Redelivery, *, consumer: str, topics: Sequence[Topic]) -> None:
        self.consumer, self.receiver = consumer, redelivery.receiver
        self.max_batch = redelivery.max_batch
        self._redelivery, self._topics = redelivery, topics

    @override
    def take(self, letter: KeptLetter) -> Usable | str:
        return usable(letter, self._topics)

    @override
    async def deliver(self, batch: Sequence[Usable]) -> Refusals:
        return await self._redelivery.deliver([RefusedEvent(*each) for each in batch])
