"""What a receiver can answer other than yes, and how it is tried again.

Here live the errors that a client of a receiver raises. Where it is away another attempt follows;
what becomes of what it refuses, whole or in part, is decided by the loop around it.
"""

from gpuledger.clock import Clock
from gpuledger.errors import GpuledgerError, UnavailableError
from gpuledger.runtime import Check, RetryingCaller
from gpuledger_sinks.metrics import RETRIES_TOTAL


class ReceiverUnavailableError(UnavailableError):
    """The receiver did not answer, or asked to be tried again later."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
        """How long the receiver asked to be left alone; 0 where it did not say."""


class RejectedError(GpuledgerError):
    """The receiver refused for good; the message is the receiver's own, unchanged."""


class PartialWriteError(RejectedError):
    """The receiver has written a part of a request and refused the rest for good.

    It must not be sent again; which part it is the receiver does not say.
    """

    def __init__(self, message: str, *, written: int, samples: int) -> None:
        super().__init__(f"{written} of {samples} samples were written: {message}")
        self.written = written
        """How many samples it has written."""


def retry_receiver(
    *, sink: str, check: Check, clock: Clock, receiver: str = "", passes_check: bool = True
) -> RetryingCaller[ReceiverUnavailableError]:
    """Return the loop for all that a sink asks of one receiver; `check` shows `receiver`."""
    return RetryingCaller(
        on=ReceiverUnavailableError,
        check=check,
        receiver=receiver,
        passes_check=passes_check,
        counter=RETRIES_TOTAL.labels(sink=sink),
        clock=clock,
        min_seconds=lambda error: error.retry_after_seconds,
    )
