"""Finds ticks whose time is booked already, because two agents write under one node name.

Examples are two releases of the agent on one machine, and a cloned virtual machine. If two ticks
overlap, the one that is read first is booked. The other one is not booked, and not shortened,
because its values were measured for its whole interval.

- **Ticks of one boot** are compared with the boot's last booked tick, by `seq` and by event time.
  They overlap only if they do so by both clocks, because one clock can mislead. If an agent
  shortens its lag, a tick covers more time than has passed by `seq`. Event time can be set.
- **Ticks of different boots** are compared by event time, because nothing else relates two boots.
  Each boot covers the time from `covered_from_ns` to its last booked tick.

A machine that reboots with its clock behind also covers some time again, but must be booked. Two
facts distinguish it from a second machine. An agent sends its ticks in order, so a boot never
returns once the next boot has sent a tick. And each boot has its own id. Therefore:

- The first tick of a boot is always booked.
- The second tick is also always booked, unless the newest boot was booked between the two. The boot
  then becomes the newest one, and time that other boots covered before no longer counts.
- Any other tick is booked only if it overlaps neither the time that the newest boot covers, nor the
  time that other boots have covered since that boot became the newest.

If a clock is set, `covered_from_ns` begins again with the next tick, so that time that the clock
has skipped does not count as covered. If a boot with a clock that is ahead has sent nothing for two
minutes, it covers no time after its last tick was read, so that another machine can continue.

A second machine that sends its ticks at once therefore adds at most the first tick of each of its
boots, and `MIN_GAP_NS` whenever the other machine's ticks come first.
"""

from typing import Final

from gpuledger.clock import NS_PER_MS
from gpuledger.records import NodeSample
from gpuledger_enricher.join.progress.passage import (
    MIN_GAP_NS,
    UNRESPONSIVE_NS,
    BootWatermark,
    NodeWatermark,
)

_NEVER: Final = -(2**63)


def overlap_ns(sample: NodeSample, watermark: NodeWatermark, *, now_ns: int) -> int | None:
    """Return for how many nanoseconds of a tick the node is booked already.

    Return `None` if the tick can be booked. The tick must not be a duplicate. `now_ns` is the
    worker's clock.
    """
    if sample.boot_id == watermark.boot_id:
        # True for most ticks, so it is tested without further calls.
        passed_ns = (sample.seq - watermark.seq) * NS_PER_MS
        if sample.interval_ns - passed_ns <= MIN_GAP_NS and not watermark.before:
            return None
        overlap = _with_previous_ns(sample, seq=watermark.seq, time_ns=watermark.time_ns)
    else:
        boot = watermark.other_boot(sample.boot_id)
        # A new boot, or one that continues after the newest boot.
        if boot is None or watermark.goes_on_with(boot):
            return None
        overlap = _with_previous_ns(sample, seq=boot.seq, time_ns=boot.time_ns)
        overlap = max(overlap, _with_boot_ns(sample, watermark, now_ns=now_ns))
    for other in watermark.before:
        if other.covered_from_ns is not None and other.boot_id != sample.boot_id:
            overlap = max(overlap, _with_boot_ns(sample, other, now_ns=now_ns))
    return overlap if overlap > MIN_GAP_NS else None


def _with_previous_ns(sample: NodeSample, *, seq: int, time_ns: int | None) -> int:
    """Return by how much a tick overlaps the last booked tick of its boot, by both clocks.

    The result is negative if the ticks are apart.
    """
    by_seq = sample.interval_ns - (sample.seq - seq) * NS_PER_MS
    if by_seq <= MIN_GAP_NS or time_ns is None:
        return by_seq
    return min(by_seq, sample.interval_ns - (sample.time_ns - time_ns))


def _with_boot_ns(sample: NodeSample, boot: NodeWatermark | BootWatermark, *, now_ns: int) -> int:
    """Return by how much a tick overlaps the time that another boot covers; negative if apart."""
    # Absent in progress of older versions.
    if boot.covered_from_ns is None or boot.time_ns is None:
        return _NEVER
    until_ns = boot.time_ns
    if now_ns - boot.last_ns >= UNRESPONSIVE_NS:
        until_ns = min(until_ns, boot.last_ns)
    begin_ns = sample.time_ns - sample.interval_ns
    return min(sample.time_ns, until_ns) - max(begin_ns, boot.covered_from_ns)
