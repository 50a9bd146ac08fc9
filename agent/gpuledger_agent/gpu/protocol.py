"""The interface to a GPU vendor: the methods of a GPU source and the errors it may raise.

Opening a source returns the GPUs that answer. In each tick every GPU is queried in its own thread,
one call group after the other. A group's answers are fields of `RawGpuSample`, in the units given
there and in `gpuledger_agent.core.readings`. Threads, deadlines, breakers, retries and tracking of
lost GPUs are implemented outside the source. A source only calls its library, blocks while the
library blocks, and raises the error that tells the caller how to recover:

    UnavailableError
    ├── SourceLostError             the source must be reopened
    │   ├── LibraryLostError        no GPU answers until then
    │   │   └── DriverNotLoadedError
    │   └── GpuLostError            this GPU does not answer until then; others may
    ├── UnsupportedError            the driver never provides the value
    └── FailedError                 the driver did not provide the value this time

Each vendor has a directory next to this file with a class that implements `GpuSource`. Import
contracts keep the rest of `gpuledger_agent.gpu` independent of vendors.
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
    """The source, or one GPU, is lost until the source is reopened."""


class LibraryLostError(SourceLostError):
    """No GPU answers until the source is reopened."""


class DriverNotLoadedError(LibraryLostError):
    """No driver is loaded at the moment."""


class GpuLostError(SourceLostError):
    """One GPU is lost until the source is reopened; the others may still answer."""


class UnsupportedError(UnavailableError):
    """The driver never provides the value."""


class FailedError(UnavailableError):
    """The driver did not provide the value this time."""


class GpuIdentity(Protocol):
    """A GPU of a source that has been opened: its UUID, its index and its handle."""

    @property
    def uuid(self) -> str:
        """The GPU's UUID."""

    @property
    def index(self) -> int:
        """The GPU's index in the driver."""

    @property
    def handle(self) -> object:
        """The GPU's handle in the vendor's library; only the source uses it."""


class Gpu(GpuIdentity, Protocol):
    """One GPU of an open source; different GPUs are queried from different threads."""

    @property
    def has_process_accounting(self) -> bool:
        """Whether the driver kept process accounting for this GPU at the last query."""

    def query(self, group: CallGroup, cursor: SampleCursor) -> dict[str, Any]:
        """Return the answer to one call group, keyed by field of `RawGpuSample`.

        `cursor` marks the ring buffer entries that were already read. Raises SourceLostError.
        """

    def fast_poll(self, cursor: SampleCursor | None, *, at: ClockReading) -> FastPoll:
        """Return the GPU's answer to a fast poll; callable from any thread.

        `cursor` marks the ring buffer entries that were already read; `None` requests only the
        energy counter. `at` is the current time. Raises UnavailableError.
        """


class DriverEvent(Enum):
    """An event about the driver's binding to GPUs."""

    NOTHING = "nothing"
    """No change."""
    UNBIND = "unbind"
    """The driver will be unbound from a GPU, and waits until no process has the GPU open."""
    BIND = "bind"
    """The driver was bound to a GPU."""


class DriverEvents(Protocol):
    """Events about the driver itself; all calls come from one thread."""

    @property
    def is_open(self) -> bool:
        """Whether events can be received."""

    @property
    def capability(self) -> Capability:
        """Whether the driver announces that it will be unbound from a GPU and, if not, why not."""

    def open(self) -> None:
        """Start to listen for events, if the driver supports them."""

    def poll(self) -> DriverEvent:
        """Return the event since the last call; after an error, stop listening."""

    def close(self) -> None:
        """Stop listening."""


class GpuEventSet(Protocol):
    """Faults that the driver reports for the GPUs of an open source; used from one thread."""

    def wait(self, timeout_ms: int) -> Detection | None:
        """Return the next event, or `None` after the timeout; raises UnavailableError."""

    def close(self) -> None:
        """Free the event set; raises UnavailableError if the source is closed."""


class GpuSource(Protocol):
    """The GPUs of one node, accessed through one vendor's library."""

    @property
    def unfound(self) -> Mapping[int, str]:
        """Names of the GPUs that did not answer when the source was opened, by driver index.

        A name is the UUID if it is known from the kernel or from before. Otherwise it is
        `PCI:0000:1b:00` if the PCI address is known, and `INDEX:1` if it is not.
        """

    @property
    def is_stuck(self) -> bool:
        """Whether a call that `open` made still hangs after `open` has returned."""

    @property
    def origin(self) -> str:
        """Where the vendor's library was found, as text for people; empty if that is unknown."""

    @property
    def driver_events(self) -> DriverEvents:
        """Events about the driver itself."""

    def open(self) -> Sequence[Gpu]:
        """Open the source and return the GPUs that answer; raises `SourceLostError`."""

    def close(self) -> None:
        """Release the driver; ignore errors, for example because the library is lost."""

    def is_answering(self, name: str) -> bool:
        """Return whether a lost GPU answers by its PCI address; callable from any thread.

        `name` is its UUID or its name in `unfound`. The source must be open. If the result is true,
        the GPU probably answers again after the source is reopened.
        """

    def versions(self) -> Mapping[str, str | None]:
        """Return the versions of the driver's software, keyed by field of `Inventory`.

        Raises `SourceLostError`.
        """

    def gpu_events(self, gpus: Sequence[GpuIdentity], *, clock: Clock) -> GpuEventSet:
        """Start to listen for faults of GPUs of the open source; raises `UnavailableError`."""

    def pci_buses(self, gpus: Sequence[GpuIdentity]) -> Mapping[str, str]:
        """Return the GPUs' UUIDs by PCI address, without GPUs that do not answer."""
