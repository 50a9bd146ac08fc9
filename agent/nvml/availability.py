"""Which GPUs were lost and came back, told once each. How it is found out is not known here."""

from collections.abc import Callable, Mapping, Sequence

from agent.metrics import GPUS_LOST

Tell = Callable[[str, str, str], None]
"""Takes an incident's kind, the GPU's UUID and one sentence for people."""


def tell_nobody(_kind: str, _gpu_uuid: str, _message: str) -> None:
    """Keep it to ourselves."""


class GpuAvailability:
    """The GPUs of a node that answered once, and those of them that do not any more."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._known: dict[str, None] = {}
        self._indices: dict[int, str] = {}
        self._unnamed: dict[int, str] = {}
        self._lost: dict[str, str] = {}

    @property
    def known(self) -> Sequence[str]:
        """The UUIDs of all GPUs that answered once."""
        return tuple(self._known)

    @property
    def lost(self) -> Mapping[str, str]:
        """Why each lost GPU is lost, by UUID."""
        return self._lost

    def lose(self, uuid: str, reason: str) -> None:
        """Take down that a GPU does not answer any more; told where that is news."""
        if uuid in self._lost:
            return
        self._lost[uuid] = reason
        GPUS_LOST.set(len(self._lost))
        self._tell("gpu_lost", uuid, reason)

    def started(self, found: Mapping[int, str], unfound: Mapping[int, str]) -> None:
        """Record a start: by index, the UUIDs that it found and what names the others.

        Those that an earlier start found are lost by their UUID, and not by another name.
        """
        self._indices |= found
        for index, name in unfound.items():
            if index not in self._indices and index not in self._unnamed:
                self._unnamed[index] = name
                self.lose(name, "it does not answer at the start of the library")

    def answered(self, uuid: str, *, index: int) -> None:
        """Record that a GPU answered; told where it was lost, be it by another name."""
        self._known[uuid] = None
        for name in (uuid, self._unnamed.pop(index, None)):
            if name in self._lost:
                self._recover(name)

    def _recover(self, uuid: str) -> None:
        reason = self._lost.pop(uuid)
        GPUS_LOST.set(len(self._lost))
        self._tell("gpu_recovered", uuid, f"it answers again; it was lost: {reason}")

    def tell_all(self, kind: str, message: str) -> None:
        """Report of something that happened to the driver, so to each GPU that was not lost."""
        for uuid in self._known:
            if uuid not in self._lost:
                self._tell(kind, uuid, message)
