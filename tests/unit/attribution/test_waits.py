"""From the API server to the store: when pods waited, were scheduled, started and ended."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.runtime import Readiness
from gpuledger.store.views import create_views
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, PodwatchSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kube import KubeApi, serve_kube_api
from gpuledger_simulator.scenario.load import parse_scenario
from gpuledger_simulator.simulation import Simulation
from tests.default_topics import PENDING_PODS, PODS
from tests.unit.enricher.podwatch.running import StillClock
from tests.unit.enricher.podwatch.running import running as running_podwatch
from tests.unit.sinks.builders import START_NS, bus, entry, event, eventually, publish, running
from tests.unit.sinks.store.storing import is_committed, store

SECOND_NS = 10**9
PROCESS = {"command": "python train.py", "gpus": [0], "memory_bytes": 2**30}


def pod(name: str, **more: object) -> dict[str, Any]:
    """Return a pod of a Job that uses a GPU."""
    containers = [{"name": "main", "processes": [PROCESS]}]
    owner = {"kind": "Job", "name": name}
    return {"namespace": "a", "name": name, "node": "n", "owner": owner} | {
        "labels": {"kueue.x-k8s.io/queue-name": "nlp"},
        "containers": containers,
        **more,
    }


SCENARIO = {
    "name": "waits",
    "nodes": [{"name": "n", "gpus": {"model": "NVIDIA L4", "count": 4}}],
    "pods": [
        pod("waited", start_seconds=31.5, wait_seconds=20, end_seconds=60),
        pod("placed-at-once", start_seconds=31.5, end_seconds=60),
        pod("never-placed", start_seconds=9_001.5, wait_seconds=8_990),
    ],
}
LIVES = """
WITH waits AS (FROM pending_pods WHERE valid_to IS NULL),
lives AS (
    SELECT DISTINCT pod_uid, pod, created_time, scheduled_time, started_time, ended_time
    FROM pods WHERE valid_to IS NULL
)
SELECT coalesce(waits.pod, lives.pod) AS pod, queue, reason, requested,
    coalesce(waits.created_time, lives.created_time) AS created_time,
    scheduled_time, started_time, ended_time, left_time IS NOT NULL AS left
FROM waits FULL JOIN lives USING (pod_uid) ORDER BY ALL
"""
"""A row for each pod."""


@pytest.mark.parametrize("restarts", [False, True])
async def test_the_store_has_each_pods_wait_once_even_if_podwatch_restarts(
    tmp_path: Path, *, restarts: bool
) -> None:
    clock = ManualClock(start_ns=START_NS)
    api = KubeApi(Simulation(parse_scenario(SCENARIO), epoch_ns=START_NS, clock=clock))
    on = bus()
    # The sink waits for the first event.
    await publish(on, event(0, entries=[entry()]))
    pauses = [(12, 2, 0), (29, 2, 0), (31, 3, 2), (32, 3, 4), (61, 3, 6), (64, 3, 8)]
    async with serve_kube_api(api, play=False) as url:
        settings = PodwatchSettings(kubernetes=KubernetesSettings(url=url))
        for seconds in [pauses[:3], pauses[3:]] if restarts else [pauses]:
            async with running_podwatch(
                bus=on,
                settings=settings,
                readiness=Readiness(),
                clock=StillClock(start_ns=START_NS),
            ):
                for second, waits, lives in seconds:
                    clock.advance_to(START_NS + second * SECOND_NS)
                    await api.pod_driver.play_due()
                    await until_published(on, waits, lives)
    # A sink that ends stores everything that it can read.
    async with running(store(tmp_path, on)):
        await eventually(is_committed(on, 1))

    gpu = ("nlp", "Unschedulable", '{"nvidia.com/gpu":"1"}')
    assert found(tmp_path) == [
        ("never-placed", *gpu, at(10), None, None, None, False),
        ("placed-at-once", None, None, None, at(30), at(30), at(31), at(60), False),
        ("waited", *gpu, at(10), at(31), at(31), at(60), True),
    ]


async def until_published(on: MemoryBus, waits: int, lives: int) -> None:
    """Wait for so many versions of waiting pods, and at least so many of pods with a node."""
    await eventually(
        lambda: len(on.kept(PENDING_PODS.name)) == waits and len(on.kept(PODS.name)) >= lives
    )


def at(second: int) -> datetime:
    return datetime.fromtimestamp(START_NS / 1e9, tz=UTC) + timedelta(seconds=second)


def found(path: Path) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        create_views(connection, str(path))
        return connection.execute(LIVES).fetchall()
