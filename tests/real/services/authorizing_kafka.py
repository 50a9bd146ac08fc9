"""A Kafka broker on which a user may do only what was granted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.admin import CreateAclsRequest
from typing_extensions import override

from tests.real.services.secure_kafka import SecureKafka


class Resource(IntEnum):
    """Types of resources, by Kafka's own numbers."""

    TOPIC = 2
    GROUP = 3
    TRANSACTIONAL_ID = 5


class Operation(IntEnum):
    """Operations, by Kafka's own numbers."""

    Read = 3
    Write = 4
    Create = 5
    Describe = 8
    DescribeConfigs = 10


class Right(NamedTuple):
    """One entry of an access list."""

    user: str
    operation: Operation
    resource: Resource
    name: str
    is_prefix: bool = False


_LITERAL, _PREFIXED, _ALLOW = 3, 4, 3


class AuthorizingKafka(SecureKafka):
    """The secure broker with access lists, which do not apply to the tests' plaintext listener."""

    name = "authorizing-kafka"
    users: Mapping[str, str] = {
        **SecureKafka.users,
        "gpuledger-sink-remote-write-second": "staple-of-second",
        "gpuledger-replay": "staple-of-replay",
        "gpuledger-watermarks": "staple-of-watermarks",
        "gpuledger-doctor": "staple-of-doctor",
        "gpuledger-inspect": "staple-of-inspect",
        "gpuledger-cluster-retire": "staple-of-cluster-retire",
        "gpuledger-topics-check": "staple-of-topics-check",
        "gpuledger-dead-letters": "staple-of-dead-letters",
        "gpuledger-dead-letters-replay": "staple-of-dead-letters-replay",
    }

    @override
    def listeners(self) -> dict[str, str]:
        return {
            **super().listeners(),
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "false",
            "super.users": "User:ANONYMOUS",
        }

    def grant(self, *resource: str, operations: Sequence[str] = ("All",)) -> None:
        """Allow the user operations on a resource, such as `--topic`, `*`."""
        self._change("--add", *resource, operations=operations)

    def revoke(self, *resource: str) -> None:
        """Revoke all grants on a resource."""
        self._change("--remove", "--force", *resource)

    async def allow(self, rights: Iterable[Right]) -> None:
        """Add entries to the access lists without starting a process for each."""
        await allow_on(self.plaintext_bootstrap_servers, rights)

    def _change(self, *arguments: str, operations: Sequence[str] = ("All",)) -> None:
        granted = [word for operation in operations for word in ("--operation", operation)]
        self.run_tool(
            "org.apache.kafka.tools.AclCommand",
            *("--bootstrap-server", self.plaintext_bootstrap_servers, *arguments),
            *("--allow-principal", f"User:{self.username}", *granted),
        )


async def allow_on(bootstrap_servers: str, rights: Iterable[Right]) -> None:
    """Add entries through brokers whose listener is exempt from access lists."""
    client = AIOKafkaClient(bootstrap_servers=bootstrap_servers)
    await client.bootstrap()
    try:
        for right in rights:
            pattern = _PREFIXED if right.is_prefix else _LITERAL
            request = CreateAclsRequest(
                right.resource,
                right.name,
                pattern,
                f"User:{right.user}",
                "*",
                right.operation,
                _ALLOW,
            )
            answer = await client.send(client.get_random_node(), request)
            assert [code for code, _ in answer.creation_responses] == [0], answer
    finally:
        await client.close()
