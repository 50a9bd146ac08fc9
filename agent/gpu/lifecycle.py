"""Starts of the library, the first one and those after a loss: in a thread of its own, never soon.

A start can take seconds, or hang. When one is wanted is decided elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

import structlog

from agent.gpu.nvidia.client import LibraryLostError, NvmlLostError
from agent.gpu.nvidia.events import DriverEvent, DriverEvents
from agent.gpu.nvidia.session import Gpu, NvmlSession
from agent.gpu.threads import Worker
from agent.metrics import NVML_STARTS
from gpuledger.runtime import Backoff

_log = structlog.get_logger(__name__)
_CALM_NS: Final = 60_000_000_000


class NvmlListener(Protocol):
    """Someone else who calls the library while it is open; called in the library's thread."""

    def opened(self, gpus: Sequence[Gpu]) -> None:
        """Begin: the library is open and these handles are good."""

    def closing(self) -> None:
        """Stop calling it, and free what is not a handle, within about a second."""


class Retry:
    """When something may be tried again; the wait begins anew after a calm minute."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._tried_ns: int | None = None
        self._due_ns = 0

    def is_due(self, now_ns: int) -> bool:
        """Return whether it may be tried."""
        return self._tried_ns is None or now_ns >= self._due_ns

    def tried(self, now_ns: int) -> None:
        """Begin the wait before the next time."""
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(self._backoff.next_seconds() * 1e9)

    def wait(self, now_ns: int, seconds: float) -> None:
        """Do not try for `seconds`; the waits after that begin anew."""
        self._backoff.reset()
        self._tried_ns = now_ns
        self._due_ns = now_ns + round(seconds * 1e9)

    def all_is_well(self, now_ns: int) -> None:
        """Forget earlier failures, unless they are so fresh that it may fail again at once."""
        if self._tried_ns is not None and now_ns - self._tried_ns > _CALM_NS:
            self._backoff.reset()
            self._tried_ns = None


class NvmlLifecycle:
    """Opens and closes the library, and hears what the driver says of itself."""

    def __init__(self, nvml: NvmlSession, *, users: Sequence[NvmlListener]) -> None:
        self._nvml = nvml
        self._users = users
        self._events = DriverEvents(nvml.library)
        self._worker = Worker("nvml")
        self._looking: Future[DriverEvent] | None = None
        self._is_late = False
        self.versions: Mapping[str, str | None] = {}
        """The node's versions by the fields of `Inventory`, as they were at the last start."""

    @property
    def is_stuck(self) -> bool:
        """Whether its thread is not back from a look of an earlier tick, so cannot start anything.

        The look of this tick has only just begun: where no GPU is asked, it outlasts the tick.
        """
        return self._is_late and self._looking is not None and not self._looking.done()

    @property
    def unbind_unheard(self) -> str | None:
        """Why the driver's unbinding is not heard of; `None` where it is."""
        return self._events.refused

    def open(self) -> "Future[Sequence[Gpu]]":
        """Begin a start; the result is the GPUs that answer, or NvmlLostError."""
        return self._worker.start(self._try_to_open)

    def close(self) -> "Future[None]":
        """Begin to let go of the driver."""
        return self._worker.start(self._close)

    def end(self) -> None:
        """Let the thread end."""
        self._worker.end()

    def look(self) -> DriverEvent:
        """Return what the driver has wished for since; looks again meanwhile, waits for nothing."""
        wish = DriverEvent.NOTHING
        self._is_late = self._looking is not None and not self._looking.done()
        if self._looking and not self._is_late:
            wish, self._looking = self._looking.result(), None
        if self._looking is None and self._events.is_open:
            self._looking = self._worker.start(self._look)
        return wish

    def _look(self) -> DriverEvent:
        try:
            return self._events.look()
        except Exception:  # noqa: BLE001  # it must not end the agent, nor fail each tick
            _log.exception("library_events_failed")
            self._events.close()
            return DriverEvent.NOTHING

    def _try_to_open(self) -> Sequence[Gpu]:
        """Open; whatever else goes wrong is a start that failed, and tried again like others."""
        try:
            return self._open()
        except NvmlLostError:
            raise
        except Exception as error:
            _log.exception("library_start_failed")
            raise LibraryLostError(f"{type(error).__name__}: {error}") from error

    def _open(self) -> Sequence[Gpu]:
        self._close()
        NVML_STARTS.inc()
        gpus = self._nvml.open()
        self.versions = self._nvml.versions()
        self._events.open()
        for user in self._users:
            _call(partial(user.opened, gpus))
        return gpus

    def _close(self) -> None:
        for user in self._users:
            _call(user.closing)
        self._events.close()
        self._nvml.close()


def _call(user: Callable[[], None]) -> None:
    """Call a user; its mistakes must not keep the library from being opened or closed."""
    try:
        user()
    except Exception:  # noqa: BLE001  # said in the docstring
        _log.exception("library_user_failed")
