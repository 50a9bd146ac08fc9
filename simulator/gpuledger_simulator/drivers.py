"""Models of how drivers report readings, from NVML's documentation and public reports.

A model does not change the state of a GPU, only how the driver reports the state. Agents do not
detect which model they read from, and must be right with each model. The defaults describe the
driver that is easiest to read.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

ProcessForm = Literal["windows", "mean", "newest", "mean_of_used", "zero", "absent", "active"]


class DriverModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A driver: what it samples, how long it keeps samples, and how it reports them."""

    version: Annotated[str, Meta(pattern=r"^[0-9]+(\.[0-9]+)+$", max_length=79)] = "580.95.05"
    """Driver version; the numbers of some fields depend on it. NVML has room for 79 characters."""
    window_seconds: Annotated[float, Meta(ge=0.02, le=1)] | None = None
    """Length of the utilization windows; default: the scenario's `sample_period_seconds`."""
    stamps: Literal["wall", "boot"] = "wall"
    """Clock of the samples' timestamps: the node's wall clock, or the time since boot."""
    rounding: Literal["nearest", "down"] = "nearest"
    """How percentages are rounded to whole numbers."""
    ring_samples: Annotated[int, Meta(ge=1, le=65_536)] = 100
    """Number of samples that a ring buffer keeps."""
    ring_idle: Literal["kept", "skipped", "dry"] = "kept"
    """How the ring buffer treats windows in which no kernel ran. `kept` stores them like all others
    and `skipped` leaves them out. `dry` empties the buffer after `dry_after_seconds` of idle
    windows and stores no more of them."""
    dry_after_seconds: Annotated[float, Meta(ge=0, le=60)] = 3.0
    """Idle seconds after which a `dry` ring buffer is emptied."""
    lost_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the utilization windows that the ring buffer loses, used or not."""
    late_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Time between the end of a window and its appearance, in the ring buffer and as the rate."""
    busy_late_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """Additional such time if the GPU was busy for the last second, in proportion if less."""
    process_window_seconds: Annotated[float, Meta(ge=0.02, le=10)] | None = None
    """Length of the windows of process utilization; default: that of the utilization windows."""
    process_lost_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the samples per process and window that the driver loses."""
    process_late_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.0
    """How much later process samples appear than those of utilization."""
    has_samples: bool = True
    """Whether the driver has samples of utilization. If not, it has the latest window's rate."""
    empty_answer: Literal["not_found", "success"] = "not_found"
    """Result if there are no samples: an error, or success with a size of zero."""
    processes: ProcessForm = "windows"
    """Form of the process utilization:

    - `windows`: one sample per window and process.
    - `mean`: one sample per process that ran since the requested timestamp, with its mean over all
      windows since then and the timestamp of the newest window.
    - `newest`: one sample per process, with the value and the timestamp of the newest window in
      which it ran.
    - `mean_of_used`: as `newest`, but with the mean of all windows in which the process ran.
    - `zero`: 0 for each process that has the GPU open, whatever it does.
    - `absent`: not supported.
    - `active`: one sample per window, with the GPU's use, of the process that ran at some instant
      of the window."""
    process_time: Literal["running", "submitted", "filled"] = "running"
    """Time that counts toward a process's percentage: `running` counts its kernels while they run,
    `submitted` counts them from submission to end, so that processes that take turns add up to more
    than the device. `filled` counts the part of the chip that they fill, which is `draw_ratio`."""
    mps_samples: Literal["clients", "server"] = "clients"
    """Whether samples of MPS clients carry their own pids, or the pid of the node's MPS server."""
    process_row_bytes: Literal[24, 32] = 24
    """Length of a row in the process lists. Drivers 535.43 to 535.86 write 32 bytes, with the
    protected memory at the end; nvidia-ml-py reads 24 bytes per row."""
    process_size_answer: Literal["insufficient_size", "success"] = "insufficient_size"
    """Result of a query for the number of processes: insufficient size, or success, in which case
    nvidia-ml-py treats the list as empty."""
    mig_monitor: bool = True
    """Whether the caller may see MIG instances, as with `NVIDIA_MIG_MONITOR_DEVICES=all` in a
    container with SYS_ADMIN. If not, a MIG-partitioned GPU returns neither handles of instances nor
    its own processes and memory."""

    def of_processes(self) -> "DriverModel":
        """Return a model whose utilization windows are this model's windows of processes."""
        return replace(
            self,
            window_seconds=self.process_window_seconds or self.window_seconds,
            lost_ratio=0.0,
            late_seconds=self.late_seconds + self.process_late_seconds,
        )

    @property
    def has_plain_lists(self) -> bool:
        """Whether nvidia-ml-py reads the driver's process lists correctly."""
        return self.process_row_bytes == 24 and self.process_size_answer == "insufficient_size"  # noqa: PLR2004  # as above
