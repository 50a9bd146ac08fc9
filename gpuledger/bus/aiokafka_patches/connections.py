"""Connections to brokers that hang: a client leaves them after a short time and queries others.

A broker that hangs, for example because of its disk, neither answers nor closes its connections,
and its operating system still accepts new ones. aiokafka waits `request_timeout_ms` for a new
connection and for metadata, which is as long as a whole call of the bus may take. Meanwhile the
client holds a lock, so it opens no connection to another broker and finds no other coordinator.
"""

from collections.abc import Awaitable
from typing import Any, ClassVar

from aiokafka import conn
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.util import wait_for
from typing_extensions import override


def leave_hanging_brokers() -> None:
    """Make all clients of this process use the connections of this module.

    Remove once aiokafka has a shorter timeout for new connections and for metadata.
    """
    conn.AIOKafkaConnection = BriefConnection


class BriefConnection(conn.AIOKafkaConnection):  # type: ignore[misc]  # aiokafka is untyped
    """Waits only `seconds` for the answers that every broker has at hand.

    It waits `request_timeout_ms` for all others, and for the login, which may need another service.
    """

    seconds: ClassVar[float] = 5.0
    """Each of three steps may take this long: accept a connection, with TLS; return the API
    versions; return metadata. A search for a coordinator may wait for all three, and must end
    within the usual `request_timeout_seconds`, 30 s."""

    _request_timeout: float

    @override
    async def connect(self) -> Any:
        self._longest_seconds = self._request_timeout
        self._request_timeout = min(self._longest_seconds, self.seconds)
        try:
            return await super().connect()
        except TimeoutError as error:
            # Without a text, its type would be reported as the reason.
            raise TimeoutError(f"no answer within {self._request_timeout:g} s") from error

    @override
    async def _do_version_lookup(self) -> None:
        await super()._do_version_lookup()
        self._request_timeout = self._longest_seconds

    @override
    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        answer: Awaitable[Any] = super().send(request, expect_response)
        is_metadata = request.API_KEY == MetadataRequest.API_KEY
        return wait_for(answer, self.seconds) if is_metadata else answer
