"""Whether podwatch published every pod: the API server's list against the newest on the topic."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from gpuledger.bus.protocol import Subscription
from gpuledger.keys import split_key
from tests.default_topics import PODS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuledger.bus.protocol import Bus
    from tests.chaos.pods import Pods

_IDLE_SECONDS: Final = 2.0
_MAX_RECORDS: Final = 1_000
_AGAIN_SECONDS: Final = 2.0


class _Pod(msgspec.Struct, frozen=True):
    resource_version: str
    deletion_time_ns: int | None = None
    phase: str | None = None


class PublishedPods(NamedTuple):
    """The comparison of the topic of pods with the API server."""

    there: int
    """Number of pods on the API server."""
    missing: int
    """Pods that are missing on the topic, or have an older version there."""

    def as_line(self) -> str:
        """Return the line that the run prints about podwatch."""
        return (
            f"pods at the API server {self.there}, missing or outdated on the topic {self.missing}"
        )


async def await_published_pods(*, bus: Bus, pods: Pods, seconds: float) -> PublishedPods:
    """Compare until all pods are published or the time is over; return the last comparison."""
    published: dict[str, str] = {}
    wanted = await asyncio.to_thread(pods.versions)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    async with bus.consumer(Subscription(group="chaos-pods", topics=[PODS.name])) as consumer:
        while True:
            polled = await consumer.poll(timeout_seconds=_IDLE_SECONDS, max_records=_MAX_RECORDS)
            for records in polled.values():
                for record in records:
                    _take(published, record.key or b"", record.value)
            found = compare(wanted, published)
            if not found.missing or loop.time() > deadline:
                return found


def compare(wanted: Mapping[str, str], published: Mapping[str, str]) -> PublishedPods:
    """Compare the versions of pods by UID."""
    missing = sum(1 for uid, version in wanted.items() if published.get(uid) != version)
    return PublishedPods(there=len(wanted), missing=missing)


def _take(published: dict[str, str], key: bytes, value: bytes | None) -> None:
    _, uid = split_key(key.decode())
    if value is None:
        published.pop(uid, None)
    else:
        published[uid] = msgspec.json.decode(value, type=_Pod).resource_version
