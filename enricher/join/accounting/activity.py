"""How much of the chip worked, apportioned: the chip's own counters are of a device as a whole.

Pure. Nothing is measured of a process: a busy second of one counts as much as one of another.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gpuledger.records import GpuProfiling

# Less than any driver can tell apart from nothing, and enough to divide by.
_LEAST_RATIO: Final = 1e-9


class Ratios(msgspec.Struct, frozen=True, gc=False):
    """The counters that are apportioned; the others of the record are passed over."""

    sm_active_ratio: float | None = None
    """Share of cycles in which a multiprocessor had work."""
    tensor_active_ratio: float | None = None
    """Share of cycles in which a tensor pipe was active."""
    dram_active_ratio: float | None = None
    """Share of cycles in which the memory interface worked."""


# Of multiprocessors, tensor pipes and memory interface: ratios, or active seconds a second.
Rates = tuple[float | None, float | None, float | None]
_UNKNOWN: Final[Rates] = (None, None, None)
_decode: Final = msgspec.json.Decoder(Ratios).decode


def ratios_of(profiling: GpuProfiling) -> Rates:
    """Give the counters of a reading, which may hold them as bytes that nobody has looked at.

    Raises `ValueError` where those are no counters.
    """
    unread: object = profiling
    counters: Ratios | GpuProfiling = profiling
    if isinstance(unread, msgspec.Raw):
        try:
            counters = _decode(unread)
        except msgspec.DecodeError as error:
            raise ValueError(f"field profiling: {error}") from error
    return counters.sm_active_ratio, counters.tensor_active_ratio, counters.dram_active_ratio


def split_active(
    profiling: GpuProfiling | None, busy: Sequence[Any], worked: float, seconds: float
) -> tuple[Rates, Sequence[float]]:
    """Give the active seconds that each second of a column stands for, and that column.

    It is the busy seconds, `worked` in sum; where nobody was busy, or that is not known, it is one
    second of nobody's, on the line above idle.
    """
    if profiling is None:
        return _UNKNOWN, busy
    sm, tensor, dram = ratios_of(profiling)
    factor = seconds
    if worked > _LEAST_RATIO * seconds:
        factor /= worked
    else:
        busy = [*[0.0] * (len(busy) - 2), 1.0, 0.0]
    return (
        None if sm is None else sm * factor,
        None if tensor is None else tensor * factor,
        None if dram is None else dram * factor,
    ), busy
