"""What the driver says of itself: that it will be unbound from a GPU, or was bound to one.

A program that keeps the library open blocks the driver's unbinding, so it must hear of it and let
go. Where the driver or nvidia-ml-py do not know these events, that is said and nothing is heard.
"""

from enum import Enum
from typing import Any, Final

import pynvml

from agent.gpu.nvidia.client import call_nvml
from gpuledger.errors import UnavailableError
from gpuledger.records import Capability

# The library is asked each tick, so it need not wait; what 0 means to it is not written anywhere.
_WAIT_MILLISECONDS: Final = 1
_MAX_EVENTS: Final = 16
_VERSIONS: Final = {
    "nvmlSystemEventSetCreate": "nvmlSystemEventSetCreateRequest_v1",
    "nvmlSystemRegisterEvents": "nvmlSystemRegisterEventRequest_v1",
    "nvmlSystemEventSetWait": "nvmlSystemEventSetWaitRequest_v1",
    "nvmlSystemEventSetFree": "nvmlSystemEventSetFreeRequest_v1",
}


class DriverEvent(Enum):
    """What the driver wants of us."""

    NOTHING = "nothing"
    """All is as it was."""
    LET_GO = "let_go"
    """It will be unbound from a GPU."""
    LOOK_AGAIN = "look_again"
    """It was bound to a GPU."""


class DriverEvents:
    """The driver's events that are not a GPU's; all calls in one thread."""

    def __init__(self, library: Any) -> None:  # noqa: ANN401  # pynvml is an untyped module
        self._library = library
        self._set: Any = None
        self._data: Any = None
        self.refused: str | None = "not open yet"
        """Why nothing is heard; `None` where something is."""

    @property
    def is_open(self) -> bool:
        """Whether there is something to listen to."""
        return self._set is not None

    def open(self) -> None:
        """Begin to listen, where the driver can be listened to."""
        try:
            self._set = self._call("nvmlSystemEventSetCreate")
            self._call("nvmlSystemRegisterEvents", _events(), self._set)
            self._data = (pynvml.c_nvmlSystemEventData_v1_t * _MAX_EVENTS)()
            self.refused = None
        except UnavailableError as error:
            self.close()
            self.refused = str(error)

    def look(self) -> DriverEvent:
        """Return what has happened since the last look; an error ends the listening."""
        if self._set is None:
            return DriverEvent.NOTHING
        try:
            happened = self._call(
                "nvmlSystemEventSetWait", self._set, _WAIT_MILLISECONDS, self._data, _MAX_EVENTS
            )
        except UnavailableError as error:
            self.close()
            self.refused = str(error)
            return DriverEvent.NOTHING
        kinds = {event["eventType"] for event in happened}
        if pynvml.nvmlSystemEventTypeGpuDriverUnbind in kinds:
            return DriverEvent.LET_GO
        return DriverEvent.LOOK_AGAIN if kinds else DriverEvent.NOTHING

    def close(self) -> None:
        """Free the event set."""
        held, self._set = self._set, None
        if held is None:
            return
        try:
            self._call("nvmlSystemEventSetFree", held)
        except UnavailableError as error:
            self.refused = str(error)

    def _call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401  # as the library has it
        version = getattr(pynvml, _VERSIONS[name], None)
        return call_nvml(self._library, name, version, *arguments)


def capability_of(refused: str | None) -> Capability:
    """Return whether the driver tells of its unbinding, by the first function that takes."""
    return Capability(call="nvmlSystemEventSetCreate", supported=refused is None, reason=refused)


def _events() -> int:
    unbind: int = pynvml.nvmlSystemEventTypeGpuDriverUnbind
    bind: int = pynvml.nvmlSystemEventTypeGpuDriverBind
    return unbind | bind
