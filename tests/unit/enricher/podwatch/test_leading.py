"""Podwatch with a Lease: the leader publishes, the other waits, and neither publishes too late."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest
from aiohttp import web
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.clock import SystemClock
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.election import LeaseLostError
from gpuledger_enricher.podwatch.kinds import POD
from gpuledger_enricher.podwatch.pod_settings import (
    KubernetesSettings,
    LeaseSettings,
    PodwatchSettings,
)
from gpuledger_enricher.podwatch.publish import RecordPublisher
from gpuledger_enricher.podwatch.table import ObjectTable
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import PatientClock, pod, pod_record, soon
from tests.unit.enricher.podwatch.lease_shelf import LeaseShelf
from tests.unit.enricher.podwatch.misbehaving import MisbehavingServer, page, serving
from tests.unit.enricher.podwatch.running import running, states, topic

PATH = "/apis/coordination.k8s.io/v1/namespaces/ledger/leases/gpuledger-podwatch"


class FastClock(SystemClock):
    """The machine's clock, ten times as fast."""

    @override
    def boottime_ns(self) -> int:
        return 10 * super().boottime_ns()

    @override
    def monotonic_ns(self) -> int:
        return 10 * super().monotonic_ns()

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / 10)


@dataclass
class Place:
    """An API server with pods and leases, and a bus."""

    server: MisbehavingServer
    shelf: LeaseShelf
    bus: MemoryBus

    def settings(self, identity: str) -> PodwatchSettings:
        return PodwatchSettings(
            kubernetes=KubernetesSettings(url=self.server.url),
            lease=LeaseSettings(enabled=True, namespace="ledger", identity=identity),
        )

    def run(self, identity: str, readiness: Readiness) -> AbstractAsyncContextManager[None]:
        return running(
            bus=self.bus, settings=self.settings(identity), readiness=readiness, clock=FastClock()
        )

    def holder(self) -> str:
        found: str = self.shelf.kept.get(PATH, {}).get("spec", {}).get("holderIdentity", "")
        return found


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    place = Place(MisbehavingServer(), LeaseShelf(), MemoryBus())
    app = web.Application()
    place.server.serve(app)
    place.shelf.serve(app)
    async with serving(app) as place.server.url:
        yield place


async def test_one_of_two_leads_and_the_other_is_a_ready_standby(place: Place) -> None:
    place.server.lists += [page(pod("a"))] * 2
    first, second = Readiness(), Readiness()
    async with place.run("one", first):
        await soon(lambda: first.check("pods.api").detail == "1 pods")
        requested = place.server.kinds().count("list")
        async with place.run("two", second):
            await soon(lambda: "standing by" in second.check("lease").detail)
            assert second.is_ready()
            assert second.check("lease").detail == "standing by: one leads"
            assert second.check("pods.api").detail == "standing by"
            assert (place.holder(), place.server.kinds().count("list")) == ("one", requested)
    assert place.holder() == ""
    assert states(await topic(place.bus)) == {"a": ["Running"]}


async def test_the_next_leader_publishes_changes_and_repeats_nothing(place: Place) -> None:
    place.server.lists += [
        page(pod("stays"), pod("goes")),
        page(pod("stays", version="50"), pod("comes"), version="51"),
    ]
    first, second = Readiness(), Readiness()
    async with place.run("two", second):
        await soon(lambda: second.check("pods.api").detail == "2 pods")
        async with place.run("one", first):
            await soon(lambda: first.check("lease").detail == "standing by: two leads")
            place.shelf.put(PATH, _allocated_to("nobody, for one second", seconds=1))
            expected = {"stays": ["Running"], "goes": ["Running", "deleted"], "comes": ["Running"]}
            async with asyncio.timeout(HANG_SECONDS):
                while states(await topic(place.bus)) != expected:  # noqa: ASYNC110  # a topic has no event to wait on
                    await asyncio.sleep(0.005)
    assert states(await topic(place.bus)) == expected


def _allocated_to(holder: str, *, seconds: int) -> dict[str, dict[str, object]]:
    return {
        "metadata": {"name": "gpuledger-podwatch"},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": seconds},
    }


async def test_nothing_is_published_once_another_process_may_lead() -> None:
    """The fence is checked before each publish, not only when the lease is renewed."""
    bus, held = MemoryBus(), [True]

    def fence() -> None:
        if not held[0]:
            raise LeaseLostError("lost")

    table = ObjectTable(
        node_of=POD.node_of,
        identity_of=POD.identity_of,
        tombstone_after_seconds=60,
        max_tombstones=10,
    )
    publisher = RecordPublisher(
        cluster="default",
        kind=POD,
        bus=bus,
        table=table,
        check=Readiness().check("pods.kafka"),
        clock=PatientClock(),
        batch_max=10,
        topic_id=None,
        fence=fence,
    )
    publishing = asyncio.create_task(publisher.run())
    table.upsert(pod_record("a"), time_ns=1)
    publisher.wake()
    await soon(lambda: table.unpublished == 0)
    held[0] = False
    table.upsert(pod_record("b"), time_ns=2)
    publisher.wake()
    with pytest.raises(LeaseLostError):
        await asyncio.wait_for(publishing, HANG_SECONDS)
    assert states(await topic(bus)) == {"a": ["Running"]}
