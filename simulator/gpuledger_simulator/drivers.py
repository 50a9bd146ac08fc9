"""In which forms a node's driver answers, as NVML's documentation and public reports allow.

What is true of a GPU does not depend on it: a driver only tells of it. An agent is not told which
one it meets, and has to be right on each. Where nothing is said a node has the kindest one.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

ProcessForm = Literal["windows", "mean", "newest", "mean_of_used", "zero", "absent"]


class DriverModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A driver: what it samples, how long it keeps that, and how it tells of it."""

    version: Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)+$", max_length=79)] = "580.95.05"
    """Its version, by which the numbers of some fields go; NVML has room for 79 characters."""
    window_seconds: Annotated[float, Meta(ge=0.02, le=1)] | None = None
    """Length of its windows of utilization; absent: the scenario's `sample_period_seconds`."""
    stamps: Literal["wall", "boot"] = "wall"
    """The clock by which samples are stamped: the machine's wall clock, or the time since boot."""
    rounding: Literal["nearest", "down"] = "nearest"
    """How whole percents are made."""
    ring_samples: Annotated[int, Meta(ge=1, le=65_536)] = 100
    """How many samples a ring buffer keeps."""
    ring_idle: Literal["kept", "skipped", "dry"] = "kept"
    """What becomes of windows in which no kernel ran: they are samples like others; they are left
    out; or the ring takes none after `dry_after_seconds` of them, and loses those it has."""
    dry_after_seconds: Annotated[float, Meta(ge=0, le=60)] = 3.0
    """Of `dry`: after how many idle seconds."""
    empty_answer: Literal["not_found", "success"] = "not_found"
    """How it says that there are no samples: with an error, or with success and a size of none."""
    processes: ProcessForm = "windows"
    """Process utilization: a sample for each window and process; or one sample a process that ran
    since the stamp that was asked for. That is, stamped with the newest window, the mean since
    then; or, stamped with the newest window in which the process ran, that window's value or the
    mean of all in which it ran. Or 0 of each process that is there, whatever it does; or not
    supported."""
    process_time: Literal["running", "submitted"] = "running"
    """What percents of a process count: its kernels while they run, or from their submission to
    their end, so that processes that take turns come to more than the device."""
    mps_samples: Literal["clients", "server"] = "clients"
    """Under whose pid clients of MPS are sampled: their own, or that of the node's server."""
    process_row_bytes: Literal[24, 32] = 24
    """Length of a row in its lists of processes: drivers of 535.43 to 535.86 have 32 bytes, with
    the protected memory behind the rest. nvidia-ml-py reads 24 of each."""
    process_size_answer: Literal["insufficient_size", "success"] = "insufficient_size"
    """What it answers who asks how many processes there are: that there is no room for them, or
    success, by which nvidia-ml-py takes the list for empty."""
    mig_monitor: bool = True
    """Whether who asks may see MIG instances, as with `NVIDIA_MIG_MONITOR_DEVICES=all` in a
    container with SYS_ADMIN. Else a GPU that is cut gives no handle of an instance, and of itself
    neither processes nor memory."""

    @property
    def has_plain_lists(self) -> bool:
        """Whether nvidia-ml-py reads its lists of processes as they are."""
        return self.process_row_bytes == 24 and self.process_size_answer == "insufficient_size"  # noqa: PLR2004  # as above
