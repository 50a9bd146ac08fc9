"""What a list and a watch of pods yield, event by event, and whether the list comes as a watch."""

from enum import Enum, auto
from http import HTTPStatus
from typing import Final, NamedTuple

import structlog

from enricher.podwatch.api import KubernetesError
from gpuledger.records import PodRecord


class Phase(Enum):
    """A step that is about no single pod."""

    LISTING = auto()
    """A complete list begins: what is not seen until `LISTED` is gone."""
    LISTED = auto()
    """The list is complete."""
    WATCHING = auto()
    """A watch is open: the server answers."""


class Upserted(NamedTuple):
    """A pod that is new, changed, or only listed again."""

    pod: PodRecord


class Deleted(NamedTuple):
    """A pod that left the API server, in its last state."""

    pod: PodRecord


class Skipped(NamedTuple):
    """A pod whose newest state cannot be read; what was known of it stays known."""

    uid: str
    """Empty where not even that can be found."""
    version: str
    name: str
    """Its namespace and name, as far as they can be found."""
    error: str
    is_deleted: bool = False
    """Whether it left the API server."""


class Interrupted(NamedTuple):
    """What ended a list or a watch; another attempt follows."""

    error: KubernetesError


Step = Phase | Upserted | Deleted | Skipped | Interrupted


# Whether the pods are listed as a watch, by what the server did with that until now. Pure.
#
# A list as a watch costs the server less and gives podwatch one pod at a time. Servers before
# Kubernetes 1.34 refuse it unless told otherwise, and something in between may not bear it.

INITIAL_EVENTS: Final = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan"}
_MAX_UNENDED: Final = 2
_UNKNOWN: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.NOT_ACCEPTABLE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.NOT_IMPLEMENTED,
    }
)
_log = structlog.get_logger(__name__)


class NoEndMarkError(KubernetesError):
    """A watch went on, or ended, without a word that every pod was told."""


class WatchLists:
    """Remembers what became of lists that came as a watch."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._unended = 0

    @property
    def wanted(self) -> bool:
        """Whether to ask for the next list as a watch: not after two in a row broke off."""
        return self._wanted and self._unended < _MAX_UNENDED

    def begin(self) -> None:
        """Record that the server has agreed to one."""
        self._unended += 1

    def end(self) -> None:
        """Record that every pod was told."""
        self._unended = 0

    def refused(self, error: KubernetesError) -> bool:
        """Return whether the server will not do this, so that pages are to be asked for at once.

        For ever, but where a permission is missing, which may be granted.
        """
        if isinstance(error, NoEndMarkError) or error.status in _UNKNOWN:
            self._wanted = False
            _log.info("watch_list_refused", error=str(error))
            return True
        return error.status == HTTPStatus.FORBIDDEN
