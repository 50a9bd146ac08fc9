"""From the nodes' NVML to Prometheus, Alertmanager and the store, as separate processes.

One run of the scenario serves all tests of this file; each test examines another output.
"""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import jsonschema
import pytest
import yaml

from gpuledger.store.query import entries_sql
from gpuledger_simulator.simulation import open_simulation
from tests.default_topics import (
    ATTRIBUTED_INCIDENTS,
    DEAD_LETTERS,
    EVENTS,
    INCIDENTS,
    INVENTORY,
    PODS,
    PROCESSES,
    SAMPLES,
)
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.end_to_end.pipeline import UIDS_FILE, Pipeline, RealParts, begin_ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuledger_simulator.simulation import Simulation
    from tests.real.services.alertmanager import AlertmanagerApi
    from tests.real.services.cluster_tools import Helm
    from tests.real.services.kafka import KafkaBroker
    from tests.real.services.kcat import Kcat, KcatMessage
    from tests.real.services.kube_client import KubeApiClient
    from tests.real.services.prometheus import PrometheusApi

ROOT = Path(__file__).parents[3]
SCENARIO = ROOT / "scenarios" / "e2e.yaml"
SCENARIO_SECONDS = 30
DEADLINE_SECONDS = 120.0
BROKEN = b"this is no JSON {"
# The consumers of a topic, which reject its broken records.
READERS = {
    SAMPLES.name: {"gpuledger-join"},
    PROCESSES.name: {"gpuledger-join"},
    INCIDENTS.name: {"gpuledger-join"},
    PODS.name: {"gpuledger-join"},
    EVENTS.name: {"gpuledger-remote-write", "gpuledger-alerts", "gpuledger-store"},
    ATTRIBUTED_INCIDENTS.name: {"gpuledger-alerts", "gpuledger-remote-write"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run's folder."""
    return tmp_path_factory.mktemp("end-to-end")


@pytest.fixture(scope="module")
def parts(
    kafka_of_this_run: KafkaBroker,
    kube_api: KubeApiClient,
    prometheus: PrometheusApi,
    alertmanager: AlertmanagerApi,
) -> RealParts:
    """Return the real parts, all ready."""
    return RealParts(
        kafka=kafka_of_this_run,
        kube_api=kube_api,
        prometheus=prometheus,
        alertmanager=alertmanager,
    )


@pytest.fixture(scope="module")
def simulation(parts: RealParts, folder: Path) -> Simulation:
    """Return the run; its pods have the UIDs that the real API server assigned."""
    epoch_ns = begin_ns(parts.kafka)
    return open_simulation(SCENARIO, epoch_ns=epoch_ns, uids_file=folder / UIDS_FILE)


@pytest.fixture(scope="module")
def pipeline(
    parts: RealParts, simulation: Simulation, folder: Path, kcat: Kcat, helm: Helm
) -> Iterator[Pipeline]:
    """Start everything, put a broken record on each topic, and play the scenario for 30 seconds."""
    refuse_stray_settings()
    made = Pipeline(parts=parts, simulation=simulation, scenario=SCENARIO, folder=folder)
    try:
        made.start()
        for topic in READERS:
            kcat.produce(parts.kafka.bootstrap_servers, topic, BROKEN, partition=1, key="k")
        made.wait_for_second(SCENARIO_SECONDS)
        yield made
    finally:
        made.kill()


def test_prometheus_answers_a_query_by_namespace_and_pod(
    pipeline: Pipeline, simulation: Simulation
) -> None:
    """The pod's owner and the method are joined to it."""
    # In its first tick the pod has memory but no busy time yet.
    warm_seconds = simulation.epoch_ns // 10**9 + SCENARIO_SECONDS // 2
    busy = 'gpuledger_pod_gpu_busy_ratio{namespace="serving",pod=~"chat-.*"}'
    query = (
        f"({busy} and timestamp({busy}) > {warm_seconds})"
        " * on (cluster, node, pod_uid) group_left (owner_name) gpuledger_pod_info"
        " * on (cluster, node, gpu_uuid) group_left (method)"
        ' gpuledger_gpu_method_info{quantity="busy"}'
    )
    found = pipeline.parts.prometheus.await_query(query, deadline_seconds=DEADLINE_SECONDS)
    labels, (_, value) = found[0]["metric"], found[0]["value"]
    assert labels["owner_name"] == "chat"
    assert labels["method"] == "process_utilization"
    assert 0.3 < float(value) < 0.7


def test_prometheus_has_the_health_of_each_gpu(pipeline: Pipeline) -> None:
    """Users with only remote-write can alert on it, by the GPU's labels."""
    query = (
        'gpuledger_gpu_ecc_errors_total{kind="uncorrected",counted="volatile"}'
        " * on (cluster, node, gpu_uuid) group_left (gpu_index, model) gpuledger_gpu_info"
    )
    found = pipeline.parts.prometheus.await_query(query, deadline_seconds=DEADLINE_SECONDS)
    assert {one["metric"]["gpu_index"] for one in found} >= {"0"}
    assert all(one["metric"]["model"] for one in found)


def test_prometheus_counts_the_xid_of_the_gpu_that_had_it(pipeline: Pipeline) -> None:
    query = "sum by (node, xid) (increase(gpuledger_gpu_xid_errors_total[10m])) > 0"
    found = pipeline.parts.prometheus.await_query(query, deadline_seconds=DEADLINE_SECONDS)
    assert {(one["metric"]["node"], one["metric"]["xid"]) for one in found} == {("gpu-a", "31")}


def test_prometheus_finds_the_gpu_that_works_for_no_pod(pipeline: Pipeline) -> None:
    """By the shipped rule, which names the node where the stray benchmark runs."""
    groups = yaml.safe_load((ROOT / "k8s/chart/rules/gpuledger.rules.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    rule = next(rule for rule in rules if rule["alert"] == "GpuBusyWithoutPod")
    found = pipeline.parts.prometheus.await_query(rule["expr"], deadline_seconds=DEADLINE_SECONDS)
    assert "gpu-c" in {one["metric"]["node"] for one in found}
    assert all(one["metric"]["gpu_index"] for one in found)


def test_alertmanager_gets_an_alert_with_the_owner_of_the_pod_on_the_gpu_with_an_xid(
    pipeline: Pipeline,
) -> None:
    """The driver's event went through the agent, the join and the sink."""
    alerts = pipeline.parts.alertmanager.await_alerts(
        "GpuIncident", deadline_seconds=DEADLINE_SECONDS
    )
    labels = next(alert["labels"] for alert in alerts if alert["labels"].get("xid") == "31")
    assert (labels["node"], labels["gpu_index"], labels["category"]) == ("gpu-a", "0", "app")
    assert (labels["namespace"], labels["pod"]) == ("research", "pretrain-worker-0")


def test_the_inventory_has_every_node_of_the_run(pipeline: Pipeline, kcat: Kcat) -> None:
    """With each GPU's model and the capabilities of its driver."""
    reported = [json.loads(each.value or b"") for each in read(pipeline, kcat, INVENTORY.name)]
    newest = {inventory["node"]: inventory for inventory in reported}
    assert newest.keys() == {"gpu-a", "gpu-b", "gpu-c"}
    assert [gpu["model"] for gpu in newest["gpu-c"]["gpus"]] == ["NVIDIA L4", "NVIDIA L4"]
    assert all(gpu["capabilities"] for inventory in reported for gpu in inventory["gpus"])


def test_kcat_prints_an_event_that_matches_its_schema(pipeline: Pipeline, kcat: Kcat) -> None:
    """Each event of the topic except the broken one."""
    schema = json.loads((ROOT / "docs" / "schemas" / f"{EVENTS.name}.schema.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    events = [each for each in read(pipeline, kcat, EVENTS.name) if each.value != BROKEN]
    assert len(events) > SCENARIO_SECONDS
    for event in events:
        validator.validate(json.loads(event.value or b""))


def test_a_broken_record_on_each_topic_becomes_a_dead_letter_and_the_stream_continues(
    pipeline: Pipeline, kcat: Kcat
) -> None:
    """With topic, partition, offset, reason and the original bytes, from each of its consumers."""
    expected = {(topic, reader) for topic, readers in READERS.items() for reader in readers}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(records := dead_letters(pipeline, kcat)) < len(expected):
        assert time.monotonic() < deadline, records
        time.sleep(0.5)
    assert {(dead_letter["topic"], dead_letter["consumer"]) for dead_letter in records} == expected
    for dead_letter in records:
        assert base64.b64decode(dead_letter["value_base64"]) == BROKEN
        assert (dead_letter["partition"], dead_letter["reason"]) == (1, "undecodable")
        assert dead_letter["topic"] in dead_letter["detail"]
        broken = read(pipeline, kcat, dead_letter["topic"])
        assert [each.offset for each in broken if each.value == BROKEN] == [dead_letter["offset"]]


def test_the_store_has_each_pods_gpu_seconds_within_one_percent_of_the_truth(
    pipeline: Pipeline, simulation: Simulation
) -> None:
    """After everything has ended cleanly, each within ten seconds of SIGTERM."""
    statuses = pipeline.end()
    assert statuses == dict.fromkeys(statuses, 0)
    booked = query(pipeline, "SELECT pod_uid, sum(busy_ns) FROM {} GROUP BY pod_uid")
    found = {uid: busy_ns / 1e9 for uid, busy_ns in booked if uid is not None}
    truth = true_seconds(pipeline, simulation)
    assert found.keys() == truth.keys()
    assert found == pytest.approx(truth, rel=0.01)


def test_the_stores_entries_sum_to_each_device(pipeline: Pipeline) -> None:
    """For each GPU and tick, they sum to the tick's length exactly, to the nanosecond."""
    ((ticks, off),) = query(
        pipeline,
        "SELECT count(*), count(*) FILTER (booked != lasted) FROM (SELECT sum(busy_ns) AS booked,"
        " any_value(interval_ns) AS lasted FROM {} WHERE busy_method != 'accounting'"
        " GROUP BY node, boot_id, seq, gpu_uuid)",
    )
    assert ticks > 0
    assert off == 0


def read(pipeline: Pipeline, kcat: Kcat, topic: str) -> list[KcatMessage]:
    """Read a topic to its end."""
    return kcat.consume(pipeline.parts.kafka.bootstrap_servers, topic)


def dead_letters(pipeline: Pipeline, kcat: Kcat) -> list[dict[str, Any]]:
    """Return the dead letters so far."""
    return [json.loads(each.value or b"") for each in read(pipeline, kcat, DEAD_LETTERS.name)]


def query(pipeline: Pipeline, sql: str) -> list[tuple[Any, ...]]:
    """Query the store; `{}` is replaced by its rows."""
    relation = entries_sql(str(pipeline.store))
    return duckdb.connect().execute(sql.format(relation)).fetchall()


def true_seconds(pipeline: Pipeline, simulation: Simulation) -> dict[str, float]:
    """Return each pod's true busy seconds in the time that its node's ticks cover."""
    covered = query(
        pipeline,
        "SELECT node, min(epoch_ns(time) - interval_ns), max(epoch_ns(time)) FROM {} GROUP BY node",
    )
    used = {
        usage.uid: usage.busy_seconds
        for node, start_ns, end_ns in covered
        for usage in simulation.truth(start_ns, end_ns, node)
    }
    return {uid: seconds for uid, seconds in used.items() if seconds > 0}
