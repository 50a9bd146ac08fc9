"""What becomes of a partition's ticks that a receiver refuses: put aside, or known to be repeated.

**Put aside.** A tick that is refused is a dead letter, with the receiver's words; of health and
incidents, which the next samples tell again, it is counted alone. Its node travels
apart for a while then, as its next tick is likely to be refused, too.

**In part.** A receiver of 2.0 writes the samples that it takes and refuses the others; what it has
written must not be sent again, so that such a request is not divided. Which ticks were refused is
not said: all of them are put aside (`partial`), and their nodes travel apart.

**Repetitions.** What lay in the partition when it was assigned may have been delivered before, and
not been committed. A strict receiver refuses that as out of order. So a node's ticks that are
refused so before its first one that is taken are repetitions, which are counted, and no losses.
"""

from collections.abc import Iterable
from typing import Final

import structlog

from gpuledger.clock import NS_PER_MINUTE, Clock
from gpuledger.dead_letter_queue import DeadLetterQueue
from gpuledger.recent import Recent
from gpuledger.runtime import Check
from gpuledger.runtime.logs import Repeats
from gpuledger_sinks.errors import PartialWriteError, RejectedError
from gpuledger_sinks.metrics import count_dropped
from gpuledger_sinks.registry import REMOTE_WRITE
from gpuledger_sinks.remote_write.request_writer import FailingError
from gpuledger_sinks.remote_write.write_client import is_behind_newer, is_out_of_order
from gpuledger_sinks.remote_write.write_requests import WriteRequest, WrittenTick

NAME: Final = REMOTE_WRITE.name
APART_NS: Final = NS_PER_MINUTE
"""How long a node whose tick was refused travels apart from others."""
_MAX_NODES: Final = 5_000
"""Of a partition, as the sender has it."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class RefusedTicks:
    """What is known of the refusals of one partition."""

    def __init__(self, *, receiver: str, check: Check, clock: Clock, repeated_before: int) -> None:
        """Take the receiver, as it is shown, and its check; `repeated_before` is an offset.

        All before it may have been sent before.
        """
        self._receiver, self._check, self._clock = receiver, check, clock
        self._repeated_before = repeated_before
        self._apart_until_ns: Recent[str, int] = Recent(max_a_day=_MAX_NODES)
        self._taken: set[str] = set()

    def is_apart(self, node: str) -> bool:
        """Return whether the ticks of a node travel alone, as one was refused a while ago."""
        until_ns = self._apart_until_ns.get(node)
        if until_ns is None:
            return False
        if self._clock.monotonic_ns() < until_ns:
            return True
        del self._apart_until_ns[node]
        return False

    def record_taken(self, request: WriteRequest) -> None:
        """Have the nodes of a request that was taken travel with others again."""
        for tick in request.ticks:
            self._apart_until_ns.pop(tick.node)
            if self._may_be_repeated(tick):
                self._taken.add(tick.node)

    def reject(
        self, tick: WrittenTick, error: RejectedError, dead_letters: DeadLetterQueue
    ) -> None:
        """Go on without a tick that is refused: it must not be sent again."""
        self._apart_until_ns[tick.node] = self._clock.monotonic_ns() + APART_NS
        message = str(error)
        if is_behind_newer(message) and self._is_repetition(tick):
            count_dropped(NAME, "repeated")
            return
        self._report(message, [tick], samples=tick.encoded.samples)
        reason = "out_of_order" if is_out_of_order(message) else "rejected"
        if isinstance(error, FailingError):
            reason = "failing"
        _reject(tick, dead_letters, reason=reason, detail=message)

    def reject_part(
        self, request: WriteRequest, error: PartialWriteError, dead_letters: DeadLetterQueue
    ) -> None:
        """Go on without what a receiver has not written of a request: not to be sent again.

        Of which ticks it is the receiver does not say, unless there is one. So each of them is put
        aside, and goes apart, so that the next refusal is of one.
        """
        if len(request.ticks) == 1:
            self.reject(request.ticks[0], error, dead_letters)
            return
        message, unwritten = str(error), request.samples - error.written
        if is_behind_newer(message) and (repeated := self._repetitions_in(request, unwritten)):
            count_dropped(NAME, "repeated", repeated)
            return
        self._report(message, request.ticks, samples=unwritten)
        apart_until_ns = self._clock.monotonic_ns() + APART_NS
        for tick in request.ticks:
            self._apart_until_ns[tick.node] = apart_until_ns
            _reject(tick, dead_letters, reason="partial", detail=message)

    def _repetitions_in(self, request: WriteRequest, samples: int) -> int:
        """Return how many ticks were sent before, where so many samples may be of such alone."""
        for number, tick in enumerate(filter(self._is_repetition, request.ticks), start=1):
            samples -= tick.encoded.samples
            if samples <= 0:
                return number
        return 0

    def _report(self, message: str, ticks: Iterable[WrittenTick], *, samples: int) -> None:
        # What is only out of order says nothing of the receiver: a node's clock was set back.
        if not is_out_of_order(message):
            # What the next samples say again has no letter.
            has_dead_letters = not all(tick.is_repeated for tick in ticks)
            remedy = ": look at `gpuledger dead-letters list`" if has_dead_letters else ""
            self._check.failed(f"rejected: {self._receiver}: {message}{remedy}")
            if number := _repeats.count("samples", more=samples):
                _log.warning("remote_write_samples_rejected", count=number, error=message)

    def _may_be_repeated(self, tick: WrittenTick) -> bool:
        return tick.record.offset < self._repeated_before

    def _is_repetition(self, tick: WrittenTick) -> bool:
        """Return whether a tick that is behind what the receiver has was sent to it before.

        One that came late to Kafka is behind it by itself.
        """
        is_first = tick.node not in self._taken and not tick.is_late
        return is_first and self._may_be_repeated(tick)


def _reject(tick: WrittenTick, dead_letters: DeadLetterQueue, *, reason: str, detail: str) -> None:
    if tick.is_repeated:
        count_dropped(NAME, reason)
    else:
        dead_letters.reject(tick.record, reason=reason, detail=detail)
