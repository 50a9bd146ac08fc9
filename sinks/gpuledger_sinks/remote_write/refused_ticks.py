"""Handles the ticks of a partition that the receiver rejects.

**Dead letters.** A rejected tick becomes a dead letter with the receiver's message. Samples of
health and incidents are only counted, because the next samples repeat their information. The node's
ticks are then sent separately for some time, because the next one is likely to be rejected too.

**Partial writes.** A receiver of 2.0 writes the samples that it accepts and rejects the others.
Written samples must not be sent again, so such a request is not divided. The response does not
identify the rejected ticks: all of them become dead letters (`partial`), and their nodes' ticks are
sent separately.

**Repetitions.** Records that were in the partition when it was assigned may have been delivered
before without a commit. A strict receiver rejects such records as out of order. Ticks that are
rejected in this way before the node's first accepted tick are therefore counted as repetitions, not
as losses.
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
"""How long the ticks of a node are sent separately after a rejection."""
_MAX_NODES: Final = 5_000
"""Maximum number of nodes per partition, as in the sender."""
_log = structlog.get_logger(__name__)
_repeats: Final = Repeats()


class RefusedTicks:
    """Tracks the rejected ticks of one partition, and the nodes whose ticks are sent separately."""

    def __init__(self, *, receiver: str, check: Check, clock: Clock, repeated_before: int) -> None:
        """Report rejections by `receiver` in `check`.

        Records before the offset `repeated_before` may have been sent before.
        """
        self._receiver, self._check, self._clock = receiver, check, clock
        self._repeated_before = repeated_before
        self._apart_until_ns: Recent[str, int] = Recent(max_a_day=_MAX_NODES)
        self._taken: set[str] = set()

    def is_apart(self, node: str) -> bool:
        """Return whether the ticks of a node are sent separately after a recent rejection."""
        until_ns = self._apart_until_ns.get(node)
        if until_ns is None:
            return False
        if self._clock.monotonic_ns() < until_ns:
            return True
        del self._apart_until_ns[node]
        return False

    def record_taken(self, request: WriteRequest) -> None:
        """Record an accepted request: its nodes need not be sent separately any longer."""
        for tick in request.ticks:
            self._apart_until_ns.pop(tick.node)
            if self._may_be_repeated(tick):
                self._taken.add(tick.node)

    def reject(
        self, tick: WrittenTick, error: RejectedError, dead_letters: DeadLetterQueue
    ) -> None:
        """Handle a rejected tick: count it as a repetition, or make a dead letter."""
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
        """Handle a request that was written in part, which must not be sent again.

        The receiver does not identify the rejected ticks. Each tick of the request therefore
        becomes a dead letter, and the ticks of its node are sent separately, so that the next
        rejection concerns only one tick.
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
        """Return how many repeated ticks of a request are needed to contain `samples` samples.

        Returns 0 if all repeated ticks together contain fewer.
        """
        for number, tick in enumerate(filter(self._is_repetition, request.ticks), start=1):
            samples -= tick.encoded.samples
            if samples <= 0:
                return number
        return 0

    def _report(self, message: str, ticks: Iterable[WrittenTick], *, samples: int) -> None:
        # Out-of-order samples are not a failure of the receiver: a node's clock was set back.
        if not is_out_of_order(message):
            # Samples whose information is repeated by the next samples have no dead letters.
            has_dead_letters = not all(tick.is_repeated for tick in ticks)
            remedy = "; see `gpuledger dead-letters list`" if has_dead_letters else ""
            self._check.failed(f"rejected: {self._receiver}: {message}{remedy}")
            if number := _repeats.count("samples", more=samples):
                _log.warning("remote_write_samples_rejected", count=number, error=message)

    def _may_be_repeated(self, tick: WrittenTick) -> bool:
        return tick.record.offset < self._repeated_before

    def _is_repetition(self, tick: WrittenTick) -> bool:
        """Return whether an out-of-order tick was sent to the receiver before.

        A tick that came late to Kafka is out of order for another reason.
        """
        is_first = tick.node not in self._taken and not tick.is_late
        return is_first and self._may_be_repeated(tick)


def _reject(tick: WrittenTick, dead_letters: DeadLetterQueue, *, reason: str, detail: str) -> None:
    if tick.is_repeated:
        count_dropped(NAME, reason)
    else:
        dead_letters.reject(tick.record, reason=reason, detail=detail)
