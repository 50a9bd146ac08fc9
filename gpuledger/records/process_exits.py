"""What a node says of a process that is done with a GPU: all that it used, and what ticks said.

Here lives the record that a tick carries of it. What is booked for it is the join's business.
"""

from gpuledger.records.base import BaseRecord, Natural, Seq
from gpuledger.records.bounds import (
    BoottimeNs,
    Pid,
    Seconds,
)


class ProcessExit(BaseRecord, frozen=True, kw_only=True):
    """A process that is done with a GPU, with the driver's account of it.

    The tick that carries it is the first one of the GPU that covers the end of the process there.
    """

    gpu: Natural
    """Position of the GPU in the tick's `gpus`."""
    pid: Pid
    """Process id in the node's own pid namespace."""
    started_boottime_ns: BoottimeNs
    """Start of the process since the node's boot."""
    container: Natural | None = None
    """Position of its container in the tick's `containers`; absent for a process of the host."""
    lifetime_seconds: Seconds
    """For how long it held the GPU open, by the driver's accounting."""
    busy_seconds: Seconds
    """Time in which its kernels ran, by the driver's accounting: percents of `lifetime_seconds`."""
    sampled_busy_seconds: Seconds
    """What ticks have said of it: where its container was alone on the GPU, the process's part of
    the device's busy time, else what its own samples said."""
    reserved_busy_seconds: Seconds
    """What of the device's busy time is set aside for it: of ticks in which no process was seen on
    the GPU, and set aside for no other process."""
    from_seq: Seq
    """The first tick that covers a part of its time on the GPU, as far as the agent remembers."""
    from_time_ns: Natural
    """Where that tick's interval begins, nanoseconds since the epoch."""
    until_seq: Seq
    """The last tick that covers a part of it."""
    until_time_ns: Natural
    """Where that tick's interval ends, nanoseconds since the epoch."""
