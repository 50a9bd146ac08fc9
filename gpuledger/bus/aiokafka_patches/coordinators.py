"""Coordinators on a broker that hangs: they are left after a short time, and looked up elsewhere.

A broker that hangs, for example because of its disk, neither answers nor closes its connections.
aiokafka looks up coordinators at a random broker, which may be the one that hangs. It waits
`request_timeout_ms` for each answer, which is as long as a whole call of the bus may take. But the
cluster has another coordinator after a few seconds.
"""

import asyncio
import random
from typing import Any, Final

from aiokafka import AIOKafkaConsumer
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import CloseReason
from aiokafka.errors import KafkaConnectionError, KafkaError, RequestTimedOutError, for_code
from aiokafka.protocol.coordination import FindCoordinatorRequest

LOOKUP_SECONDS: Final = 3.0
"""How long one broker may take to return a coordinator before the next broker is queried."""
ANSWER_SECONDS: Final = 10.0
"""How long a coordinator may take to answer. Brokers hold a request for at most
`offsets.commit.timeout.ms`, 5 s."""


def look_up_at_each_broker(client: AIOKafkaClient, *, seconds: float = LOOKUP_SECONDS) -> None:
    """Make the client query one broker after the other for a coordinator, each for a short time.

    Remove once aiokafka queries another broker if one does not answer.
    """

    async def look_up(kind: Any, key: str) -> Any:  # noqa: ANN401  # aiokafka is untyped
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        failure: KafkaError = KafkaConnectionError("no broker is known")
        for node in random.sample(nodes, len(nodes)):
            try:
                async with asyncio.timeout(seconds):
                    answer = await client.send(node, FindCoordinatorRequest(key, kind))
            except TimeoutError:
                failure = RequestTimedOutError()
            except KafkaError as error:
                failure = error
            else:
                if not answer.error_code:
                    return answer.coordinator_id
                failure = for_code(answer.error_code)()
        raise failure

    client.coordinator_lookup = look_up


def leave_coordinator(client: AIOKafkaConsumer) -> None:
    """Forget the group's coordinator and close the connection to it, because it did not answer.

    All other requests on this connection fail at once, and are sent to the next coordinator.
    """
    coordinator = client._coordinator
    at = coordinator.coordinator_id, ConnectionGroup.COORDINATION
    coordinator.coordinator_dead()
    if (connection := client._client._conns.get(at)) is not None:
        connection.close(reason=CloseReason.CONNECTION_TIMEOUT)
