"""A component without its topics or permissions stays alive, names them, and recovers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from tests.default_topics import EVENTS, PODS, SAMPLES, TOPICS
from tests.real.changed_topics import delete
from tests.real.end_to_end.components import Component, refuse_stray_settings
from tests.real.services import web

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.authorizing_kafka import AuthorizingKafka
    from tests.real.services.kafka import Kafka
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.prometheus import PrometheusApi

DEADLINE_SECONDS = 120.0
READERS_OF_EVENTS = {"remote_write", "alerts", "store", "rows"}
IN_TRANSACTIONS = {"join", "rows"}
IN_GROUPS = READERS_OF_EVENTS | {"join"}


class Everything:
    """One of each component, on one broker."""

    def __init__(self, *, folder: Path, receivers: Mapping[str, str]) -> None:
        self._folder, self._receivers = folder, receivers
        self._running: dict[str, Component] = {}

    def start(self, **settings: str) -> None:
        """Start all of them."""
        spool = self._folder / "spool"
        spool.mkdir(exist_ok=True)
        kafka = {
            "KAFKA__REQUEST_TIMEOUT_SECONDS": "5",
            "KAFKA__SESSION_TIMEOUT_SECONDS": "6",
            **settings,
        }
        commands = {
            "agent": ["gpuledger", "agent", "--source", "simulated"],
            "podwatch": ["gpuledger", "podwatch"],
            "join": ["gpuledger", "join"],
            **{kind: ["gpuledger", "sink", kind] for kind in sorted(READERS_OF_EVENTS)},
        }
        own = {
            "agent": {"NODE_NAME": "node-a", "SPOOL__DIRECTORY": str(spool)},
            "join": {"JOIN__PODWATCH_TIMEOUT_SECONDS": "0"},
            "podwatch": {"KUBERNETES__KUBECONFIG": self._receivers["podwatch"]},
            "remote_write": {"REMOTE_WRITE__URL": self._receivers["remote_write"]},
            "alerts": {"ALERTS__URLS": f'["{self._receivers["alerts"]}"]'},
            "store": {"STORE__URI": str(self._folder / "table")},
        }
        for name, command in commands.items():
            self._running[name] = Component(
                name=name,
                command=command,
                folder=self._folder / name,
                environment=kafka | own.get(name, {}),
            )
            self._running[name].start()

    def leave_out(self, name: str) -> None:
        """End one of them for the rest of the test."""
        self._running.pop(name).kill()

    def end(self) -> None:
        """End all of them."""
        for each in self._running.values():
            each.kill()

    async def until_printed(self, message: str, *, by: set[str] | None = None) -> None:
        """Wait until each of them has a failed check with this text, and none has ended."""

        def reports_it(name: str) -> bool:
            return any(message in check["detail"] for check in self._failed(name).values())

        await self._until(
            lambda: [name for name in by or self._running if not reports_it(name)], message
        )

    async def until_ready(self) -> None:
        """Wait until no check of any of them fails, except those of parts that do not come back."""

        def fails(name: str) -> bool:
            return any(not check.endswith("gaps") for check in self._failed(name))

        await self._until(lambda: [name for name in self._running if fails(name)], "ready")

    async def _until(self, waited_for: Callable[[], list[str]], what: str) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while missing := await asyncio.to_thread(waited_for):
            for name, each in self._running.items():
                assert each.exit_status() is None, f"{name} ended: {each.log_tail()}"
            shown = {name: self._failed(name) for name in missing}
            assert time.monotonic() < end, f"not {what!r}: {shown}"
            await asyncio.sleep(0.3)

    def _failed(self, name: str) -> dict[str, Any]:
        try:
            answer = web.fetch(f"{self._running[name].health}/readyz")
        except OSError:
            return {"pages": {"detail": "not there yet"}}
        found = orjson.loads(answer.body)
        failed = {key: check for key, check in found["checks"].items() if not check["ok"]}
        assert (answer.status == 200) == found["ready"]
        if any(check["severity"] == "critical" for check in failed.values()):
            assert answer.status == 503
        return failed or ({} if found["checks"] else {"none": {"detail": "no check yet"}})


@pytest.fixture
def everything(
    tmp_path: Path,
    kube_api: KubeApiClient,
    prometheus: PrometheusApi,
    alertmanager: AlertmanagerApi,
) -> Iterator[Everything]:
    refuse_stray_settings()
    receivers = {
        "podwatch": str(kube_api.kubeconfig),
        "remote_write": prometheus.remote_write_url,
        "alerts": alertmanager.url,
    }
    found = Everything(folder=tmp_path, receivers=receivers)
    yield found
    found.end()


async def test_missing_or_deleted_topics_are_named_and_waited_for(
    start_kafka: Callable[[], Kafka], everything: Everything
) -> None:
    servers = (await asyncio.to_thread(start_kafka)).bootstrap_servers
    settings = KafkaSettings(bootstrap_servers=servers)
    everything.start(KAFKA__BOOTSTRAP_SERVERS=servers)
    await everything.until_printed(SAMPLES.name, by={"agent", "join"})
    await everything.until_printed(PODS.name, by={"podwatch"})
    await everything.until_printed("there is no topic", by=READERS_OF_EVENTS)

    await create_topics(settings, TOPICS)
    await everything.until_ready()

    await delete(settings, EVENTS, SAMPLES)
    await everything.until_printed(EVENTS.name, by=READERS_OF_EVENTS)
    await everything.until_printed(SAMPLES.name, by={"agent", "join"})
    # It ends if a topic is recreated: its stored rows are from the old topic.
    everything.leave_out("store")

    await create_topics(settings, TOPICS)
    await everything.until_ready()


@pytest.mark.extended
async def test_missing_or_revoked_permissions_are_named_and_waited_for(
    start_authorizing_kafka: Callable[[], AuthorizingKafka], everything: Everything
) -> None:
    kafka = await asyncio.to_thread(start_authorizing_kafka)
    plaintext = KafkaSettings(bootstrap_servers=kafka.plaintext_bootstrap_servers)
    await create_topics(plaintext, TOPICS)
    everything.start(
        KAFKA__BOOTSTRAP_SERVERS=kafka.bootstrap_servers,
        KAFKA__SECURITY_PROTOCOL="SASL_SSL",
        KAFKA__SASL_USERNAME=kafka.username,
        KAFKA__SASL_PASSWORD=kafka.password,
        KAFKA__SSL_CA_FILE=str(kafka.ca_file),
    )
    await everything.until_printed("denies this user access to the topic")

    await asyncio.to_thread(kafka.grant, "--topic", "*")
    await everything.until_printed("grant it Read on that group", by=IN_GROUPS)
    await asyncio.to_thread(kafka.grant, "--group", "*")
    await everything.until_printed("grant it Describe and Write on the ids", by=IN_TRANSACTIONS)
    await asyncio.to_thread(kafka.grant, "--transactional-id", "*")
    await everything.until_ready()

    await asyncio.to_thread(kafka.revoke, "--group", "*")
    await everything.until_printed("grant it Read on that group", by=IN_GROUPS)
    await asyncio.to_thread(kafka.revoke, "--topic", "*")
    await everything.until_printed("denies this user access to the topic", by=IN_GROUPS)

    await asyncio.to_thread(kafka.grant, "--topic", "*")
    await asyncio.to_thread(kafka.grant, "--group", "*")
    await everything.until_ready()
