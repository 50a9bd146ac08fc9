"""The seam to a vendor: what the agent needs of a source of GPUs, and which errors it may raise.

A source is opened, gives the GPUs that answer, and is closed. Each tick every GPU is queried in
its own thread, one group after the other; a group's answers are fields of `RawGpuSample`, in the
units given there and in `gpuledger_agent.core.readings`. All else (threads, deadlines, breakers,
retries, what is lost and what came back) is done on this side of the seam, so a source needs none
of it: it calls its library, blocks as long as that does, and says by the error what would help.

    UnavailableError
    ├── SourceLostError             the source must be opened again
    │   ├── LibraryLostError        no GPU answers until then
    │   │   └── DriverNotLoadedError
    │   └── GpuLostError            this GPU does not; the others may
    ├── UnsupportedError            the driver never gives this
    └── FailedError                 the driver did not give this now

A vendor is a folder beside this file that holds a class with the methods of `GpuSource`; the
import contracts keep everything else in `gpuledger_agent.gpu` from knowing it.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.records import Capability
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.core.raw import CallGroup, ClockReading, FastPoll, SampleCursor


class SourceLostError(UnavailableError):
    """The source, or a GPU, is lost until the source is opened again."""


class LibraryLostError(SourceLostError):
    """No GPU answers until the source is opened again."""


class DriverNotLoadedError(LibraryLostError):
    """There is no driver now."""


class GpuLostError(SourceLostError):
    """One GPU is lost; the others may answer."""


class UnsupportedError(UnavailableError):
    """The driver does not give this, now or later."""


class FailedError(UnavailableError):
    """The driver did not give this, now."""


class GpuIdentity(Protocol):
    """Which GPU of an open source it is."""

    @property
    def uuid(self) -> str:
        """Its identity."""

    @property
    def index(self) -> int:
        """The driver's index of it."""

    @property
    def handle(self) -> object:
        """What its source knows it by; opaque to everybody else."""


class Gpu(GpuIdentity, Protocol):
    """One GPU of an open source; different GPUs are queried from different threads."""

    @property
    def has_process_accounting(self) -> bool:
        """Whether its driver keeps accounts of processes, by the last answer."""

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        """Return the answer to one group, by the fields of `RawGpuSample`.

        `cursor` says what of the ring buffers is known already. Raises SourceLostError.
        """

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        """Return what is asked of it between two ticks, from any thread; raises UnavailableError.

        `cursor` says what of the ring buffers is known already; `None` asks for its energy alone.
        `at` is what the clocks show.
        """


class DriverEvent(Enum):
    """What the driver is about to do, or has done, to a GPU."""

    NOTHING = "nothing"
    """All is as it was."""
    UNBIND = "unbind"
    """It will be unbound from a GPU, and waits until nobody holds it open."""
    BIND = "bind"
    """It was bound to a GPU."""


class DriverEvents(Protocol):
    """The driver's own events; all calls come from one thread."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to listen to."""

    @property
    def capability(self) -> Capability:
        """Whether the driver reports its unbinding, and why not."""

    def open(self) -> None:
        """Begin to listen, where the driver can be listened to."""

    def poll(self) -> DriverEvent:
        """Return what has happened since the last call; an error ends the listening."""

    def close(self) -> None:
        """Listen no more."""


class GpuEventSet(Protocol):
    """The faults that the driver reports of the GPUs of an open source; used from one thread."""

    def wait(self, timeout_ms: int) -> Detection | None:
        """Return the next event, `None` where none comes in time; raises UnavailableError."""

    def close(self) -> None:
        """Free what is held; raises UnavailableError where the source is closed."""


class GpuSource(Protocol):
    """The GPUs of one node, behind one vendor's library."""

    @property
    def unfound(self) -> Mapping[int, str]:
        """What names the GPUs that did not answer when it was opened, by the driver's index.

        `PCI:0000:1b:00` where the driver knows the slot, else `INDEX:1`.
        """

    @property
    def is_stuck(self) -> bool:
        """Whether a call of an opening has not returned yet, though the opening is over."""

    @property
    def origin(self) -> str:
        """Where the vendor's library was found, for people; empty where that says nothing."""

    @property
    def driver_events(self) -> DriverEvents:
        """The driver's own events."""

    def open(self) -> Sequence[Gpu]:
        """Return the GPUs that answer; raises SourceLostError where it cannot be opened."""

    def close(self) -> None:
        """Let go of the driver; a library that is lost has nothing to let go of."""

    def versions(self) -> Mapping[str, str | None]:
        """Return the driver's versions by the fields of `Inventory`; raises SourceLostError."""

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> GpuEventSet:
        """Begin to listen to the faults of these GPUs, of this opening; raises UnavailableError."""

    def pci_buses(self, gpus: Sequence[GpuIdentity]) -> Mapping[str, str]:
        """Return the GPUs' UUIDs by the PCI addresses at which they are plugged in."""
