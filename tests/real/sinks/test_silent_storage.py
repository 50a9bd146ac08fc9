"""The store on an object store that accepts connections and never answers."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

from gpuledger.runtime.retry import SLOW_SECONDS
from tests.real.services import web
from tests.real.sinks.running_sinks import Sink, make_topics, publish, ticks

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka

LAG = 'gpuledger_sink_lag_seconds{sink="store"}'


async def test_the_check_fails_soon_and_waiting_events_are_lag_if_the_storage_never_answers(
    broker: Kafka, start_sink: Callable[..., Sink]
) -> None:
    await make_topics(broker)
    await publish(broker, ticks(5))
    with socket.create_server(("127.0.0.1", 0), backlog=500) as silent:
        options = {
            "aws_endpoint": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "aws_access_key_id": "key",
            "aws_secret_access_key": "secret",
            "aws_region": "us-east-1",
            "aws_allow_http": "true",
        }
        sink = start_sink(
            "store",
            broker,
            store__uri="s3://bucket/store",
            store__storage_options=json.dumps(options),
        )
        sink.wait_until(sink.is_ready, deadline_seconds=120)
        assert not receiver(sink)["ok"]
        sink.wait_until(
            lambda: "no answer for" in receiver(sink)["detail"],
            deadline_seconds=SLOW_SECONDS + 30,
        )
        assert not receiver(sink)["ok"]
        assert lag_seconds(sink) >= SLOW_SECONDS
        assert sink.stop(deadline_seconds=120) == 0


def receiver(sink: Sink) -> dict[str, Any]:
    checks = json.loads(web.fetch(f"{sink.health}/readyz").body)["checks"]
    found: dict[str, Any] = checks["store.receiver"]
    return found


def lag_seconds(sink: Sink) -> float:
    page = web.fetch(f"{sink.health}/metrics").body.decode()
    (line,) = [line for line in page.splitlines() if line.startswith(LAG)]
    return float(line.split()[-1])
