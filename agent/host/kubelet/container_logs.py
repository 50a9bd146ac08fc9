"""The names of containers by the runtime's id, from the names of their logs.

The kubelet links each container's log as `<pod>_<namespace>_<container>-<64 hex>.log`. Only names
of files are read: their contents are root's, and none of our business.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from gpuledger.clock import NS_PER_SECOND, Clock

MAX_NAMES: Final = 4096
"""A node runs some hundreds of containers; their predecessors' logs are linked too."""
_FIRST_WAIT_NS: Final = NS_PER_SECOND
_MAX_WAIT_NS: Final = 64 * _FIRST_WAIT_NS
# Kubernetes' names are of these characters; other files may have any, and need not be UTF-8.
_NAME: Final = re.compile(
    r"(?P<pod>[-.a-z0-9]+)_(?P<namespace>[-a-z0-9]+)_(?P<container>[-a-z0-9]+)"
    r"-(?P<id>[0-9a-f]{64})\.log"
)

ListNames = Callable[[], Iterable[str]]
"""Gives the names of all logs."""


class ContainerName(msgspec.Struct, frozen=True, kw_only=True):
    """What people call a container."""

    namespace: str
    """Namespace of its pod."""
    pod: str
    """Name of its pod."""
    container: str
    """Its name in the pod."""
    pod_uid: str | None = None
    """The pod's UID; the names of logs do not tell it."""


def list_folder(folder: Path) -> ListNames:
    """Make a lister of a folder's file names; one that is not there is empty."""

    def names() -> list[str]:
        try:
            return os.listdir(folder)  # noqa: PTH208  # names alone, without a Path for each
        except OSError:
            return []

    return names


class ContainerNames:
    """Names by container id, looked up when one is asked for that is not known."""

    def __init__(self, *, list_names: ListNames, clock: Clock) -> None:
        self._list_names = list_names
        self._clock = clock
        self._names: dict[str, ContainerName] = {}
        self._looked_ns: int | None = None
        self._missing: dict[str, tuple[int, int]] = {}

    def name_of(self, container_id: str) -> ContainerName | None:
        """Return the name of a container; `None` where it is no pod's, or has no log yet."""
        if known := self._names.get(container_id):
            return known
        # At most once a second for all, and ever more seldom for one that is never found.
        now_ns = self._clock.monotonic_ns()
        due_ns, wait_ns = self._missing.get(container_id, (0, 0))
        is_rested = self._looked_ns is None or now_ns - self._looked_ns >= _FIRST_WAIT_NS
        if not is_rested or now_ns < due_ns:
            return None
        self._look()
        self._missing.pop(container_id, None)
        known = self._names.get(container_id)
        if known is None:
            if len(self._missing) >= MAX_NAMES:
                # Bounded, whatever ids are asked for; each is looked for once more then.
                self._missing.clear()
            wait_ns = min(2 * wait_ns, _MAX_WAIT_NS) or _FIRST_WAIT_NS
            self._missing[container_id] = (self._clock.monotonic_ns() + wait_ns, wait_ns)
        return known

    def _look(self) -> None:
        self._looked_ns = self._clock.monotonic_ns()
        found: dict[str, ContainerName] = {}
        for name in self._list_names():
            match = _NAME.fullmatch(name)
            if match:
                container_id = match["id"]
                found[container_id] = self._names.get(container_id) or ContainerName(
                    namespace=match["namespace"], pod=match["pod"], container=match["container"]
                )
            # Whoever can write into the folder cannot make the agent's memory grow.
            if len(found) >= MAX_NAMES:
                break
        self._names = found
