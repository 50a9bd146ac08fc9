"""The real parts themselves: each starts, answers, and comes back after a stop or a kill."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.client import AIOKafkaClient
from aiokafka.errors import KafkaConnectionError

from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription, TopicPartition
from tests.real.bus.builders import settings_of
from tests.real.services import web
from tests.real.services.kcat import Kcat
from tests.real.services.kube_client import KubeApiClient
from tests.real.services.kubeconfig import read_kubeconfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.real.services.alertmanager import Alertmanager, AlertmanagerApi
    from tests.real.services.kafka import Kafka, KafkaBroker
    from tests.real.services.kafka_pool import KafkaPool
    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.prometheus import (
        Prometheus,
        Prometheus2,
        PrometheusApi,
        VictoriaMetrics,
    )
    from tests.real.services.secure_kafka import SecureKafka

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "trainer", "namespace": "parts"},
    "spec": {"nodeName": "node-a", "containers": [{"name": "main", "image": "trainer:1"}]},
}
READ_PODS: list[dict[str, Any]] = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "read-pods", "namespace": "parts"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "read-pods", "namespace": "parts"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": "read-pods",
        },
        "subjects": [{"kind": "ServiceAccount", "name": "watcher", "namespace": "parts"}],
    },
]


async def create_topic(broker: KafkaBroker) -> str:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap_servers)
    await admin.start()
    topic = f"parts-{uuid.uuid4().hex}"
    try:
        await admin.create_topics([NewTopic(topic, num_partitions=2, replication_factor=1)])
    finally:
        await admin.close()
    return topic


async def test_kcat_reads_from_kafka_the_exact_bytes_that_it_wrote(
    kafka: KafkaBroker, kcat: Kcat
) -> None:
    topic = await create_topic(kafka)
    values = [b"first\nline", bytes(range(256)), b"{}"]
    for value in values:
        kcat.produce(kafka.bootstrap_servers, topic, value, key="node-a", partition=1)
    messages = kcat.consume(kafka.bootstrap_servers, topic)
    assert [message.value for message in messages] == values
    assert {(message.key, message.partition) for message in messages} == {(b"node-a", 1)}
    topics = kcat.metadata(kafka.bootstrap_servers)["topics"]
    assert topic in [known["topic"] for known in topics]


async def test_kafka_keeps_acknowledged_records_over_a_stop_and_a_kill(
    start_kafka: Callable[[], Kafka], kcat: Kcat
) -> None:
    broker = start_kafka()
    topic = await create_topic(broker)
    for end in (broker.stop, broker.kill):
        kcat.produce(broker.bootstrap_servers, topic, end.__name__.encode(), partition=0)
        end()
        broker.start()
    values = [message.value for message in kcat.consume(broker.bootstrap_servers, topic)]
    assert values == [b"stop", b"kill"]


async def test_a_lent_kafka_is_empty_for_the_next_test(
    kafka_pool: KafkaPool[Kafka], kcat: Kcat
) -> None:
    """Topics, groups and their members are removed; a broker with a transaction is discarded."""
    first = kafka_pool.lend()
    bus = KafkaBus(settings_of(first.bootstrap_servers))
    topic = await create_topic(first)
    async with bus.consumer(Subscription(group="left", topics=[topic])) as consumer:
        while not consumer.assignment():
            await consumer.poll(timeout_seconds=0.2, max_records=1)
        await consumer.commit({TopicPartition(topic, 0): 0})
        kafka_pool.take_back(first)
        again = kafka_pool.lend()
    assert again is first
    seen = [known["topic"] for known in kcat.metadata(first.bootstrap_servers)["topics"]]
    assert [name for name in seen if not name.startswith("__")] == []

    producer = AIOKafkaProducer(bootstrap_servers=first.bootstrap_servers, transactional_id="left")
    await producer.start()
    await producer.begin_transaction()
    await producer.send_and_wait(await create_topic(first), b"left")
    kafka_pool.take_back(first)
    other = kafka_pool.lend()
    assert other is not first
    kafka_pool.take_back(other)
    await producer.stop()


async def log_in(broker: SecureKafka, *, password: str) -> None:
    # Not with kcat: Debian's librdkafka repeats the nonce in SCRAM, which Kafka 4 rejects.
    client = AIOKafkaClient(
        bootstrap_servers=broker.bootstrap_servers,
        security_protocol="SASL_SSL",
        ssl_context=ssl.create_default_context(cafile=str(broker.ca_file)),
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username=broker.username,
        sasl_plain_password=password,
    )
    try:
        await client.bootstrap()
    finally:
        await client.close()
        # TLS sends a last message after the close, and no code waits for it.
        await asyncio.sleep(0.1)


async def test_secure_kafka_accepts_the_right_password_over_tls(secure_kafka: SecureKafka) -> None:
    await log_in(secure_kafka, password=secure_kafka.password)


async def test_secure_kafka_rejects_a_wrong_password(secure_kafka: SecureKafka) -> None:
    with pytest.raises(KafkaConnectionError):
        await log_in(secure_kafka, password="wrong")


def test_the_api_server_keeps_a_pod_that_a_kubelet_reports_running(kube_api: KubeApiClient) -> None:
    kube_api.create_namespace("parts")
    kube_api.apply(POD)
    path = "/api/v1/namespaces/parts/pods/trainer"
    status, _ = kube_api.request(
        "PATCH",
        f"{path}/status",
        {"status": {"phase": "Running"}},
        content_type="application/strategic-merge-patch+json",
    )
    assert status == 200
    assert kube_api.request("GET", path)[1]["status"]["phase"] == "Running"


def test_the_api_server_reports_the_version_it_was_built_from(kube_api: KubeApiClient) -> None:
    assert kube_api.request("GET", "/version")[1]["gitVersion"] == "v1.36.3"


def test_a_service_account_may_do_what_its_role_allows_and_no_more(
    kube_api: KubeApiClient, tmp_path: Path
) -> None:
    kubeconfig = kube_api.service_account_kubeconfig(namespace="parts", name="watcher")
    for manifest in READ_PODS:
        kube_api.apply(manifest)
    cluster, login = read_kubeconfig(kubeconfig, folder=tmp_path)
    watcher = KubeApiClient(cluster=cluster, login=login, kubeconfig=kubeconfig, folder=tmp_path)
    assert watcher.request("GET", "/api/v1/namespaces/parts/pods")[0] == 200
    status, answer = watcher.request("GET", "/api/v1/namespaces/parts/secrets")
    assert (status, answer["reason"]) == (403, "Forbidden")


def test_a_restarted_api_server_keeps_its_objects_and_forgets_compacted_versions(
    start_kube_api: Callable[..., KubeApi],
) -> None:
    api = start_kube_api()
    version = api.request("GET", "/api/v1/namespaces")[1]["metadata"]["resourceVersion"]
    api.create_namespace("kept")
    api.forget_history()
    assert api.request("GET", "/api/v1/namespaces/kept")[0] == 200
    query = f"resourceVersionMatch=Exact&resourceVersion={version}"
    status, answer = api.request("GET", f"/api/v1/namespaces?{query}")
    assert (status, answer["reason"]) == (410, "Expired")
    query = f"watch=1&timeoutSeconds=5&resourceVersion={version}"
    status, event = api.request("GET", f"/api/v1/namespaces?{query}")
    assert (status, event["type"], event["object"]["code"]) == (200, "ERROR", 410)
    api.stop_server()
    with pytest.raises(OSError, match="refused"):
        api.request("GET", "/api/v1/namespaces")


def test_prometheus_answers_a_query(prometheus: PrometheusApi) -> None:
    assert prometheus.query("vector(42)")[0]["value"][1] == "42"


def test_prometheus_rejects_a_remote_write_body_that_is_not_snappy(
    prometheus: PrometheusApi,
) -> None:
    answer = web.fetch(prometheus.remote_write_url, method="POST", body=b"not snappy")
    assert answer.status == 400
    assert b"snappy" in answer.body or b"corrupt" in answer.body


def test_prometheus_accepts_the_configuration_and_flags_of_a_test(
    start_prometheus: Callable[..., Prometheus],
) -> None:
    part = start_prometheus(
        config="global: {external_labels: {cluster: parts}}",
        arguments=["--query.max-samples=7"],
    )
    config = web.fetch(f"{part.url}/api/v1/status/config").json()["data"]["yaml"]
    flags = web.fetch(f"{part.url}/api/v1/status/flags").json()["data"]
    assert "cluster: parts" in config
    assert flags["query.max-samples"] == "7"


def test_prometheus_2_has_no_remote_write_2_0(
    start_prometheus_2: Callable[[], Prometheus2],
) -> None:
    version = start_prometheus_2().fetch("/api/v1/status/buildinfo").json()["data"]["version"]
    assert version.startswith("2.42.")


def test_victoria_metrics_returns_the_samples_it_was_sent(
    start_victoria_metrics: Callable[[], VictoriaMetrics],
) -> None:
    part = start_victoria_metrics()
    line = b'parts_total{pod="trainer"} 3\n'
    web.fetch(f"{part.url}/api/v1/import/prometheus", method="POST", body=line)
    assert part.await_query("parts_total")[0]["metric"]["pod"] == "trainer"


def test_alertmanager_has_the_alert_it_was_sent(
    start_alertmanager: Callable[..., Alertmanager],
) -> None:
    part = start_alertmanager()
    post_alert(part, "GpuIncident")
    found = part.await_alerts("GpuIncident")
    assert found[0]["labels"]["node"] == "node-a"


def post_alert(part: AlertmanagerApi, alertname: str) -> None:
    alert: dict[str, Any] = {"labels": {"alertname": alertname, "node": "node-a"}}
    answer = web.fetch(
        f"{part.url}/api/v2/alerts",
        method="POST",
        body=json.dumps([alert]).encode(),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status == 200


def test_promtool_distinguishes_a_valid_rule_from_an_invalid_one(
    promtool: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yml"
    status = {}
    for expression in ("up == 0", "up =="):
        rule = f"{{alert: Down, expr: '{expression}'}}"
        rules.write_text(f"groups: [{{name: parts, rules: [{rule}]}}]")
        done = subprocess.run([promtool, "check", "rules", rules], check=False, capture_output=True)
        status[expression] = done.returncode
    assert status["up == 0"] == 0
    assert status["up =="] != 0
