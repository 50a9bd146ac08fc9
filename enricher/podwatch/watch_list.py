"""Whether the pods are listed as a watch, by what the server did with that until now. Pure.

A list as a watch costs the server less and gives podwatch one pod at a time. Servers before
Kubernetes 1.34 refuse it unless told otherwise, and something in between may not bear it.
"""

from http import HTTPStatus
from typing import Final

import structlog

from enricher.podwatch.api import KubernetesError

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
