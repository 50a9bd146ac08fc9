"""A client leaves a broker that hangs after a short time, and continues with the others."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain, repeat
from typing import Final, Literal

import pytest
from aiokafka.client import AIOKafkaClient, CoordinationType
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.protocol.admin import ApiVersionResponse_v0
from aiokafka.protocol.coordination import FindCoordinatorRequest, FindCoordinatorResponse_v0
from aiokafka.protocol.metadata import MetadataResponse_v0

from gpuledger.bus.aiokafka_patches.connections import BriefConnection
from gpuledger.bus.aiokafka_patches.coordinators import look_up_at_each_broker
from gpuledger.bus.kafka_connection import KafkaConnection
from gpuledger.errors import BusUnavailableError
from gpuledger.settings import KafkaSettings
from tests.hanging import HANG_SECONDS

_ANSWERS: Final = (ApiVersionResponse_v0, MetadataResponse_v0, FindCoordinatorResponse_v0)
PATIENT_SECONDS: Final = HANG_SECONDS * 10
"""A client that waited this long for a broker would exceed the test's time."""


@pytest.fixture(autouse=True)
def _installed() -> None:
    KafkaConnection(KafkaSettings())


class Broker:
    """A broker that knows itself and others. While it hangs, it still accepts connections."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.port = 0
        self.others: Sequence[Broker] = ()
        self.coordinators: Iterator[Broker] = iter(())
        """The coordinators that it returns, one for each request."""
        self._answers = asyncio.Event()
        self._serving: set[asyncio.Task[None] | None] = set()
        self.resume()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hang(self) -> None:
        self._answers.clear()

    def resume(self) -> None:
        self._answers.set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            try:
                yield
            finally:
                self.resume()
                await asyncio.gather(*filter(None, self._serving))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                (length,) = struct.unpack(">i", await reader.readexactly(4))
                request = await reader.readexactly(length)
                await self._answers.wait()
                (key,) = struct.unpack(">h", request[:2])
                answer = request[4:8] + self._answer_to(key)
                writer.write(struct.pack(">i", len(answer)) + answer)
        writer.close()

    def _answer_to(self, key: int) -> bytes:
        match key:
            case ApiVersionResponse_v0.API_KEY:
                answer = ApiVersionResponse_v0(0, [(each.API_KEY, 0, 0) for each in _ANSWERS])
            case MetadataResponse_v0.API_KEY:
                brokers = [(each.node, "127.0.0.1", each.port) for each in (self, *self.others)]
                answer = MetadataResponse_v0(brokers, [])
            case _:
                found = next(self.coordinators)
                answer = FindCoordinatorResponse_v0(0, found.node, "127.0.0.1", found.port)
        return bytes(answer.encode())


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Callable[[Broker], None]:
    """Return a function that makes a broker hang, and then limits the short time to less."""

    def make(broker: Broker) -> None:
        broker.hang()
        monkeypatch.setattr(BriefConnection, "seconds", 0.05)

    return make


@asynccontextmanager
async def client_of(broker: Broker) -> AsyncIterator[AIOKafkaClient]:
    client = AIOKafkaClient(
        bootstrap_servers=broker.address, request_timeout_ms=int(PATIENT_SECONDS * 1000)
    )
    try:
        async with asyncio.timeout(HANG_SECONDS):
            await client.bootstrap()
            yield client
    finally:
        await client.close()


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
async def test_a_client_does_not_wait_for_a_first_broker_that_hangs(
    protocol: Literal["PLAINTEXT", "SSL"], hang: Callable[[Broker], None]
) -> None:
    broker = Broker(0)
    async with broker.running(), asyncio.timeout(HANG_SECONDS):
        hang(broker)
        settings = KafkaSettings(
            bootstrap_servers=broker.address,
            request_timeout_seconds=PATIENT_SECONDS,
            security_protocol=protocol,
        )
        with pytest.raises(BusUnavailableError, match=r"cannot connect .* no answer within 0.05 s"):
            await KafkaConnection(settings).describe("rows")


async def test_metadata_does_not_wait_for_a_broker_that_hangs(
    hang: Callable[[Broker], None],
) -> None:
    broker = Broker(0)
    async with broker.running(), client_of(broker) as client:
        assert await client.force_metadata_update()
        hang(broker)
        assert not await client.force_metadata_update()


async def test_other_requests_keep_the_client_s_timeout(
    hang: Callable[[Broker], None],
) -> None:
    broker = Broker(0)
    broker.coordinators = iter([broker])
    async with broker.running(), client_of(broker) as client, asyncio.TaskGroup() as tasks:
        assert await client.ready(broker.node)
        hang(broker)
        request = FindCoordinatorRequest("join", CoordinationType.GROUP)
        answer = tasks.create_task(client.send(broker.node, request))
        assert not await client.force_metadata_update()  # the short time is over
        broker.resume()
        assert (await answer).coordinator_id == broker.node


async def test_the_next_coordinator_is_found_if_brokers_first_return_the_one_that_hangs(
    hang: Callable[[Broker], None],
) -> None:
    """Brokers return it until the controller has fenced it."""
    hanging, living = Broker(0), Broker(1)
    living.others = [hanging]
    living.coordinators = chain([hanging, hanging], repeat(living))
    async with hanging.running(), living.running(), client_of(living) as client:
        hang(hanging)
        look_up_at_each_broker(client, seconds=0.2)
        coordinator = GroupCoordinator(client, SubscriptionState(), group_id="join")
        try:
            await coordinator.ensure_coordinator_known()
            assert coordinator.coordinator_id == living.node
        finally:
            await coordinator.close()
