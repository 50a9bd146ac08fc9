"""Requests written until they are taken or refused, and the bound on those that fail for ever.

A receiver may answer one request with 5xx for ever, which is to be tried again for ever by the
protocol. Where it takes others meanwhile, that ends (`FailingError`): what holds several ticks is
divided after a part of the time, and one tick alone goes aside after all of it. While the receiver
takes nothing at all, everything waits.
"""

from itertools import count
from typing import Final

from gpuledger.clock import NS_PER_MINUTE, NS_PER_SECOND, Clock
from gpuledger.runtime import RetryingCaller
from gpuledger_sinks.errors import ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.write_client import Payload, RemoteWriteClient

_TAKES_OTHERS_NS: Final = NS_PER_MINUTE
"""A receiver that took another request within that time is at work."""
_POISON_ATTEMPTS: Final = 5
_DIVIDED_PART: Final = 10
"""Several ticks together have this part of the time that one has before it goes aside."""


class FailingError(RejectedError):
    """The receiver fails at this request for long, and takes others; the message is its own."""


class Writer:
    """Writes requests until they are taken or refused; one for all partitions.

    It knows by that whether a receiver which fails at one request takes others.
    """

    def __init__(
        self,
        *,
        client: RemoteWriteClient,
        retry: RetryingCaller[ReceiverUnavailableError],
        clock: Clock,
        poison_seconds: float,
    ) -> None:
        """Take what sends; after `poison_seconds` of failures one tick goes aside, 0 is never."""
        self._client, self._retry, self._clock = client, retry, clock
        self._poison_ns = round(poison_seconds * NS_PER_SECOND)
        self._taken_ns = -_TAKES_OTHERS_NS

    async def write(self, message: Payload, *, ticks: int) -> int:
        """Return how many samples the receiver has written, once it has taken those of so many.

        Raises PartialWriteError and RejectedError as the client does, FailingError where the
        receiver fails at these ticks alone.
        """
        begun_ns, attempts = self._clock.monotonic_ns(), count()

        async def attempt() -> int:
            number = next(attempts)
            try:
                return await self._client.write(message, attempt=number)
            except ReceiverUnavailableError as error:
                if self._is_poison(begun_ns, attempts=number + 1, ticks=ticks):
                    raise FailingError(str(error)) from error
                raise

        written = await self._retry(attempt)
        self._taken_ns = self._clock.monotonic_ns()
        return written

    def _is_poison(self, begun_ns: int, *, attempts: int, ticks: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        limit_ns = self._poison_ns // _DIVIDED_PART if ticks > 1 else self._poison_ns
        takes_others = self._taken_ns > begun_ns and now_ns - self._taken_ns < _TAKES_OTHERS_NS
        is_long = attempts >= _POISON_ATTEMPTS and now_ns - begun_ns >= limit_ns
        return bool(limit_ns) and takes_others and is_long
