"""The manifests of the guide scale workloads, with a real KEDA, prometheus-adapter and HPA.

A pod uses at most one GPU. A load of 3.6 GPUs ends at five replicas, because 0.72 of a GPU each is
within the HPA's tolerance of the threshold 0.7.
"""

from __future__ import annotations

import asyncio
import re
import textwrap
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from tests.default_topics import EVENTS
from tests.real.end_to_end.components import Component
from tests.real.played_workloads import NAMESPACE, PlayedWorkloads
from tests.real.published_workloads import PublishedWorkloads
from tests.real.services import web
from tests.real.services.autoscaling import (
    ControllerManager,
    KedaAdapter,
    KedaOperator,
    PrometheusAdapter,
    aggregation_arguments,
)
from tests.real.services.certificates import Authority
from tests.real.services.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from tests.real.services.kafka import Kafka
    from tests.real.services.kubernetes import KubeApi
    from tests.real.services.prometheus import Prometheus
    from tests.real.services.starter import Starter

pytestmark = pytest.mark.extended

GUIDE: Final = (Path(__file__).parents[2] / "docs" / "guides" / "autoscaling.md").read_text()
LOAD: Final = 3.6
SECONDS: Final = 90.0


def block(heading: str, number: int = 0) -> Any:  # noqa: ANN401  # any YAML value
    """Return a YAML block of a section of the guide."""
    section = GUIDE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^ *```yaml\n(.*?)^ *```", section, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(textwrap.dedent(found[number]))


def await_true(probe: Callable[[], bool], *, what: str) -> None:
    web.await_some(lambda: [1] if probe() else [], what=what, deadline_seconds=SECONDS)


@pytest.fixture
def kube(start_kube_api: Callable[..., KubeApi], tmp_path: Path) -> KubeApi:
    return start_kube_api(arguments=aggregation_arguments(tmp_path / "front-proxy"))


@pytest.fixture
def played(
    kube: KubeApi, starter: Starter, autoscaling_programs: Mapping[str, Path]
) -> Iterator[PlayedWorkloads]:
    """A workload `chat` with two pods, and a busy one whose name begins alike."""
    starter.start(
        ControllerManager(
            binary=autoscaling_programs["kube-controller-manager"],
            folder=starter.new_folder("controllers"),
            kube=kube,
        )
    )
    with PlayedWorkloads(kube) as played:
        played.deploy("chat", replicas=2, load=LOAD)
        played.deploy("chat-v2", replicas=3, load=3)
        yield played


@pytest.fixture
def prometheus_url(played: PlayedWorkloads, start_prometheus: Callable[..., Prometheus]) -> str:
    return start_prometheus(config=played.scrape_config).url


@pytest.fixture
def keda(kube: KubeApi, starter: Starter, autoscaling_programs: Mapping[str, Path]) -> None:
    operator = starter.start(
        KedaOperator(
            binary=autoscaling_programs["keda-operator"],
            folder=starter.new_folder("keda-operator"),
            kube=kube,
        )
    )
    starter.start(
        KedaAdapter(
            binary=autoscaling_programs["keda-adapter"],
            folder=starter.new_folder("keda-adapter"),
            kube=kube,
            operator=operator,
        )
    )


def scaled_object(heading: str, prometheus_url: str) -> dict[str, Any]:
    """Return a ScaledObject of the guide, which KEDA evaluates every two seconds."""
    manifest: dict[str, Any] = block(heading)
    manifest["spec"] |= {"pollingInterval": 2, "cooldownPeriod": 5}
    for trigger in manifest["spec"]["triggers"]:
        trigger["metadata"]["serverAddress"] = prometheus_url
    return manifest


def is_settled(played: PlayedWorkloads, hpa: str, replicas: int) -> bool:
    """Return whether the HPA's desired and current replicas agree at the expected average."""
    path = f"/apis/autoscaling/v2/namespaces/{NAMESPACE}/horizontalpodautoscalers/{hpa}"
    code, found = played.kube.request("GET", path)
    if code == HTTPStatus.NOT_FOUND:
        return False
    status = found.get("status", {})
    seen = str(status.get("currentMetrics"))
    return (
        status.get("desiredReplicas") == status.get("currentReplicas") == replicas
        and f"'averageValue': '{round(1000 * LOAD / replicas)}m'" in seen
        and played.replicas("chat") == replicas
    )


def test_keda_scales_a_workload_by_its_own_pods_to_zero_and_back(
    played: PlayedWorkloads, prometheus_url: str, keda: None
) -> None:
    """An outage of monitoring changes nothing."""
    manifest = scaled_object("Scale to zero and back", prometheus_url)
    played.kube.apply(manifest)
    await_true(lambda: is_settled(played, "keda-hpa-chat", 5), what="five replicas under load")

    played.is_silent = True
    await_true(
        lambda: condition(played, manifest, "Ready") != "True", what="the outage of monitoring"
    )
    assert played.replicas("chat") == 5

    played.is_silent, played.loads["chat"] = False, 0
    await_true(lambda: played.replicas("chat") == 0, what="no replicas without load")

    played.loads["chat"], played.waiting = LOAD, 45
    await_true(lambda: is_settled(played, "keda-hpa-chat", 5), what="five replicas again")


def test_an_outage_of_monitoring_does_not_scale_down(
    played: PlayedWorkloads, prometheus_url: str, keda: None
) -> None:
    manifest = scaled_object("Scale with KEDA", prometheus_url)
    played.kube.apply(manifest)
    await_true(lambda: is_settled(played, "keda-hpa-chat", 5), what="five replicas under load")

    played.is_silent = True

    def is_falling_back() -> bool:
        return condition(played, manifest, "Fallback") == "True"

    await_true(is_falling_back, what="the fallback")
    assert played.replicas("chat") == 5

    played.is_silent, played.loads["chat"] = False, 0
    await_true(lambda: played.replicas("chat") == 2, what="the minimum without load")


def test_keda_scales_a_workload_without_prometheus(
    played: PlayedWorkloads,
    keda: None,
    start_kafka: Callable[[], Kafka],
    starter: Starter,
    tmp_path: Path,
) -> None:
    kafka = start_kafka()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    asyncio.run(create_topics(settings, [EVENTS]))
    (port,) = free_ports(1)
    pair = Authority(folder=tmp_path / "authority").issue("127.0.0.1")
    scaler = Component(
        name="scaler",
        command=["gpuledger", "sink", "scaler"],
        folder=tmp_path / "scaler",
        environment={
            "KAFKA__BOOTSTRAP_SERVERS": kafka.bootstrap_servers,
            "SCALER__LISTEN": f"127.0.0.1:{port}",
            "SCALER__WINDOW_SECONDS": "3",
            "SCALER__CERT_FILE": str(pair.certificate),
            "SCALER__KEY_FILE": str(pair.key),
        },
    )
    played.deploy("prefill", replicas=1, load=0)
    manifest = block("Scale with KEDA, without Prometheus", 1)
    manifest["spec"] |= {"pollingInterval": 2, "cooldownPeriod": 5}
    for trigger in manifest["spec"]["triggers"]:
        trigger["metadata"] |= {
            "scalerAddress": f"127.0.0.1:{port}",
            "enableTLS": "true",
            "unsafeSsl": "true",
        }
    with PublishedWorkloads(played, bootstrap_servers=kafka.bootstrap_servers):
        scaler.start()
        try:
            scaler.wait_until_ready()
            played.kube.apply(manifest)
            await_true(lambda: is_settled(played, "keda-hpa-chat", 5), what="five under load")

            played.is_silent = True
            await_true(lambda: condition(played, manifest, "Ready") == "False", what="unknown use")
            assert played.replicas("chat") == 5

            played.is_silent, played.loads["chat"] = False, 0
            await_true(lambda: played.replicas("chat") == 0, what="no replicas without load")

            # From here on, KEDA polls too rarely to start the workload.
            manifest["spec"]["pollingInterval"] = 600
            played.kube.apply(manifest)
            played.loads |= {"chat": LOAD, "prefill": 1}
            await_true(lambda: is_settled(played, "keda-hpa-chat", 5), what="five again")
        finally:
            scaler.stop()


def condition(played: PlayedWorkloads, manifest: dict[str, Any], kind: str) -> str:
    """Return the status of a condition of a ScaledObject."""
    _, found = played.kube.request("GET", played.kube.path_of(manifest))
    by_kind = {one["type"]: one["status"] for one in found["status"]["conditions"]}
    status: str = by_kind.get(kind, "")
    return status


def test_an_hpa_scales_a_workload_through_prometheus_adapter(
    played: PlayedWorkloads,
    prometheus_url: str,
    kube: KubeApi,
    starter: Starter,
    autoscaling_programs: Mapping[str, Path],
) -> None:
    values = block("Scale with a HorizontalPodAutoscaler", 0)
    starter.start(
        PrometheusAdapter(
            binary=autoscaling_programs["prometheus-adapter"],
            folder=starter.new_folder("prometheus-adapter"),
            kube=kube,
            prometheus_url=prometheus_url,
            rules=values["rules"]["custom"],
        )
    )
    kube.apply(block("Scale with a HorizontalPodAutoscaler", 1))
    await_true(lambda: is_settled(played, "chat", 5), what="five replicas under load")

    played.loads["chat"] = 0.5
    await_true(lambda: played.replicas("chat") == 2, what="the minimum at a low load")
