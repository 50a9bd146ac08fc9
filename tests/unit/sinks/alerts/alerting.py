"""The alerts sink over a bus in memory, and the requests that its Alertmanagers received."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from msgspec.structs import replace
from prometheus_client import REGISTRY
from typing_extensions import override

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, TopicPartition
from gpuledger.codec import encode
from gpuledger.keys import node_key
from gpuledger.records import AttributedIncident, Category, GpuEvent, Incident, Severity
from gpuledger.runtime import Readiness
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import ALERTS
from gpuledger_sinks.settings import AlertsSettings
from tests.default_topics import ATTRIBUTED_INCIDENTS
from tests.hanging import HANG_SECONDS
from tests.unit.sinks.builders import (
    GPU,
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    committed,
    entry,
    event,
    place_of,
)
from tests.unit.sinks.receiver import Answer, Received, Receiver

AT = place_of(NODE)


AT_INCIDENTS = place_of(NODE, ATTRIBUTED_INCIDENTS.name)


class WaitingClock(ManualClock):
    """A clock that only the test moves: waiting before another attempt does not move it."""

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.005)


class GatedClock(WaitingClock):
    """A clock whose waits before another attempt end when the test opens its gate."""

    def __init__(self) -> None:
        super().__init__(START_NS + SECOND_NS)
        self.gate = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        await self.gate.wait()


def sink(
    on: MemoryBus,
    *receivers: Receiver,
    readiness: Readiness | None = None,
    clock: ManualClock | None = None,
    **changes: Any,  # noqa: ANN401  # as AlertsSettings takes them
) -> asyncio.Future[None]:
    settings = AlertsSettings(
        urls=[receiver.url for receiver in receivers],
        **{"timeout_seconds": HANG_SECONDS} | changes,
    )
    return asyncio.ensure_future(
        run_sink(
            ALERTS,
            bus=on,
            settings=settings,
            readiness=readiness or Readiness(),
            clock=clock or WaitingClock(START_NS + SECOND_NS),
        )
    )


def quiet(tick: int) -> GpuEvent:
    return event(tick, entries=[entry(), entry(Category.IDLE)])


def rejected() -> float:
    labels = {"sink": "alerts", "reason": "rejected"}
    return REGISTRY.get_sample_value("gpuledger_sink_dropped_total", labels) or 0.0


def answers(of: Receiver, status: str) -> float:
    """Return the number of such responses that it has sent; raises KeyError before the first."""
    labels = {"alertmanager": of.url, "status": status}
    counted = REGISTRY.get_sample_value("gpuledger_sink_alertmanager_answers_total", labels)
    if counted is None:
        raise KeyError(status)
    return counted


def is_committed(
    on: MemoryBus, offset: int, *, at: TopicPartition = AT_INCIDENTS
) -> Callable[[], bool]:
    return lambda: committed(on, ALERTS.group, at) == offset


def alerts(receiver: Receiver) -> list[dict[str, Any]]:
    return [alert for request in receiver.received for alert in orjson.loads(request.body)]


INVALID = {"Content-Type": "application/json"}


REFUSED = Answer(400, '"invalid label set"\n', INVALID)


TOO_LARGE = Answer(413, "<html>too large</html>")


def incident(time_ns: int) -> AttributedIncident:
    return AttributedIncident(
        incident=Incident(
            cluster="default",
            node=NODE,
            boot_id="boot-1",
            gpu_uuid=GPU,
            time_ns=time_ns,
            kind="xid",
            source="nvml",
            severity=Severity.CRITICAL,
            xid=79,
            message="GPU has fallen off the bus",
            processes=[],
        ),
        pods=[],
    )


async def publish_incidents(on: MemoryBus, *xids: int, node: str = NODE) -> None:
    at = place_of(node, ATTRIBUTED_INCIDENTS.name)
    async with on.producer() as producer:
        for xid in xids:
            one = incident(START_NS)
            # Each on a GPU of its own, because XIDs of one GPU are one alert.
            own = replace(one.incident, node=node, xid=xid, gpu_uuid=f"{GPU}-{xid}")
            value = encode(replace(one, incident=own))
            await producer.publish(
                *at, [Message(key=node_key(own).encode(), value=value, timestamp_ms=0)]
            )


def xids(receiver: Receiver, *, since: int = 0) -> set[str]:
    requests = receiver.received[since:]
    return {alert["labels"]["xid"] for each in requests for alert in orjson.loads(each.body)}


def is_reported(receiver: Receiver, xid: int, *, since: int = 0) -> Callable[[], bool]:
    return lambda: str(xid) in xids(receiver, since=since)


@asynccontextmanager
async def hanging() -> AsyncIterator[Receiver]:
    """Run an Alertmanager that accepts requests and never answers."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requested.received.append(Received("", {}, await reader.readline()))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    requested = Receiver(url=f"http://{host}:{port}")
    async with server:
        yield requested
