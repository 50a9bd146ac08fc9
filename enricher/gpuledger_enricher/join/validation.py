"""Rules for decoded ticks: their fields agree. No I/O.

Decoding checks the types of a tick, and `gpuledger.placement` its key and partition; this module
checks the rules between fields. Ticks are not repaired. Positions need no check of their own,
because booking a tick with an invalid position raises an error. If a tick lists a GPU, an instance
or a container twice, its use would be booked twice, and it is unknown which of the two is right. So
the whole tick is rejected, like any other tick that contradicts itself.
"""

from gpuledger.errors import GpuledgerError
from gpuledger.records import GpuBooks, LateAdjustment, NodeSample
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.booking.late_adjustments import adjust_ends
from gpuledger_enricher.join.booking.shares import RepeatedContainerError


class InvalidTickError(GpuledgerError):
    """The fields of a tick contradict each other; the message names the field, value and rule."""


def book_valid_tick(sample: NodeSample) -> list[GpuBooks]:
    """Return the books of a tick; raise `InvalidTickError` if its fields contradict each other."""
    if sample.interval_ns <= 0:
        raise InvalidTickError(f"field interval_ns: {sample.interval_ns} is not above 0")
    if len({reading.uuid for reading in sample.gpus}) < len(sample.gpus):
        raise InvalidTickError(_explain_repeated_gpu(sample))
    try:
        return book_tick(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error
    except RepeatedContainerError as error:
        (position,) = error.args
        raise InvalidTickError(f"field containers[{position}]: duplicate container") from error


def adjust_valid_ends(sample: NodeSample) -> list[LateAdjustment] | None:
    """Return the late adjustments of a tick; raise `InvalidTickError` if a position is invalid."""
    try:
        return adjust_ends(sample)
    except IndexError as error:
        raise InvalidTickError(_explain_position(sample)) from error


def _explain_position(sample: NodeSample) -> str:
    tables = {"gpu": len(sample.gpus), "container": len(sample.containers)}
    lists = {"processes": sample.processes, "ended_processes": sample.ended_processes or ()}
    wrong = (
        f"field {listed}[{index}].{name}: {position} is not a position in {name}s ({size})"
        for listed, processes in lists.items()
        for index, process in enumerate(processes)
        for name, size in tables.items()
        if (position := getattr(process, name)) is not None and position >= size
    )
    return next(wrong)


def _explain_repeated_gpu(sample: NodeSample) -> str:
    uuids = [reading.uuid for reading in sample.gpus]
    repeated = next(position for position, uuid in enumerate(uuids) if uuids.index(uuid) < position)
    return f"field gpus[{repeated}].uuid: duplicate UUID {uuids[repeated]!r}"
