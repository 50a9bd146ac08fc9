"""A Kafka broker on which a user may do nothing that was not granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tests.real.parts.process import Process
from tests.real.parts.secure_kafka import SecureKafka

if TYPE_CHECKING:
    from collections.abc import Sequence

GRANT_SECONDS = 30.0


class AuthorizingKafka(SecureKafka):
    """The secure broker with access lists; the tests' own plaintext listener is above them."""

    name = "authorizing-kafka"

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
        """Take back what was granted on a resource."""
        self._change("--remove", "--force", *resource)

    def _change(self, *arguments: str, operations: Sequence[str] = ("All",)) -> None:
        argv = self._java("org.apache.kafka.tools.AclCommand")
        argv += ["--bootstrap-server", self.plaintext_bootstrap_servers, *arguments]
        argv += ["--allow-principal", f"User:{self.username}"]
        for operation in operations:
            argv += ["--operation", operation]
        changing = Process(name="acl", argv=argv, folder=self.folder)
        changing.start()
        changing.wait_until(lambda: changing.exit_status() == 0, deadline_seconds=GRANT_SECONDS)
