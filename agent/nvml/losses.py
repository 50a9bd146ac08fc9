"""Which GPUs were lost and came back, told once each. How it is found out is not known here."""

from collections.abc import Callable, Mapping, Sequence

from agent.metrics import GPUS_LOST

Tell = Callable[[str, str, str], None]
"""Takes an incident's kind, the GPU's UUID and one sentence for people."""


def tell_nobody(_kind: str, _gpu_uuid: str, _message: str) -> None:
    """Keep it to ourselves."""


class Losses:
    """The GPUs of a node that answered once, and those of them that do not any more."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._known: dict[str, None] = {}
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

    def answered(self, uuid: str) -> None:
        """Take down that a GPU answered; told where it was lost."""
        self._known[uuid] = None
        if uuid not in self._lost:
            return
        reason = self._lost.pop(uuid)
        GPUS_LOST.set(len(self._lost))
        self._tell("gpu_recovered", uuid, f"it answers again; it was lost: {reason}")

    def tell_all(self, kind: str, message: str) -> None:
        """Tell of something that happened to the driver, so to each GPU that was not lost."""
        for uuid in self._known:
            if uuid not in self._lost:
                self._tell(kind, uuid, message)
