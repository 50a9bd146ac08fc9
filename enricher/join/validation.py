"""What a well-formed tick must still hold so that it can be booked.

Types are checked by decoding; here stand the rules between fields. Nothing is repaired. The rules
on positions cost nothing where they hold: booking a tick that breaks one runs into it.
"""

from enricher.join.booking.books import book_tick
from enricher.join.booking.settlement import settle_ends
from gpuledger.errors import GpuledgerError
from gpuledger.records import GpuBooks, NodeSample, Settlement


class InvalidTickError(GpuledgerError):
    """A tick whose fields contradict one another; the message names field, value and rule."""


def book_valid_tick(sample: NodeSample) -> list[GpuBooks]:
    """Return the books of a tick; raises `InvalidTickError` where it cannot be booked."""
    if sample.interval_ns <= 0:
        raise InvalidTickError(f"field interval_ns: {sample.interval_ns} is no length of time")
    try:
        return book_tick(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error


def settle_valid_ends(sample: NodeSample) -> list[Settlement] | None:
    """Return the settlements of a tick; raises `InvalidTickError` where they cannot be made."""
    try:
        return settle_ends(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error


def _explain_position(sample: NodeSample) -> str:
    tables = {"gpu": len(sample.gpus), "container": len(sample.containers)}
    lists = {"processes": sample.processes, "ended_processes": sample.ended_processes or ()}
    wrong = (
        f"field {listed}[{place}].{name}: {position} is no position in {name}s ({size})"
        for listed, processes in lists.items()
        for place, process in enumerate(processes)
        for name, size in tables.items()
        if (position := getattr(process, name)) is not None and position >= size
    )
    return next(wrong)
