"""k8s/ on a real API server: applied as documented, admitted, and with sufficient permissions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from gpuledger.topics import Topic
from tests.data.kubernetes.subset import subset
from tests.default_topics import NAMESPACES, NODES, PODS
from tests.real.deployment.chart import BILL, render
from tests.real.deployment.installation import (
    NAMESPACE,
    Installation,
    can_i,
    documented_commands,
    documented_questions,
    eventually,
    fill_in,
    on,
)
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services import web
from tests.real.services.cluster_tools import Helm, Kubectl
from tests.real.services.kubernetes import KubeApi
from tests.real.services.secure_kafka import SecureKafka
from tests.real.services.starter import running
from tests.unit.deployment.components import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.end_to_end.components import Component
    from tests.real.services.kafka import KafkaDistribution
    from tests.real.services.kcat import Kcat

ACCOUNT = f"system:serviceaccount:{NAMESPACE}:gpuledger-podwatch"
DEFAULT_ACCOUNTS = [
    f"system:serviceaccount:{name}:default" for name in (NAMESPACE, "gpuledger-agent")
]
LEASES = {"group": "coordination.k8s.io", "resource": "leases"}
LEASE = {**LEASES, "name": "gpuledger-podwatch"}
MAY: list[dict[str, str]] = [
    *(
        {"verb": verb, "resource": name}
        for name in ("pods", "nodes", "namespaces")
        for verb in ("get", "list", "watch")
    ),
    {"verb": "create", **LEASES, "namespace": NAMESPACE},
    *({"verb": verb, **LEASE, "namespace": NAMESPACE} for verb in ("get", "update")),
]
MAY_NOT: list[dict[str, str]] = [
    *(
        {"verb": verb, "resource": name}
        for name in ("pods", "nodes", "namespaces")
        for verb in ("create", "update", "patch", "delete")
    ),
    {"verb": "get", "resource": "pods", "subresource": "log"},
    {"verb": "create", "resource": "pods", "subresource": "exec"},
    *({"verb": "get", "resource": name} for name in ("secrets", "configmaps")),
    *({"verb": "list", "resource": name} for name in ("secrets", "services")),
    {"verb": "get", "resource": "secrets", "namespace": NAMESPACE},
    {"verb": "create", "resource": "serviceaccounts", "subresource": "token"},
    {"verb": "impersonate", "resource": "users"},
    *({"verb": verb, **LEASE, "namespace": NAMESPACE} for verb in ("delete", "patch", "watch")),
    {"verb": "list", **LEASES, "namespace": NAMESPACE},
    {"verb": "update", **LEASES, "name": "another", "namespace": NAMESPACE},
    {"verb": "get", **LEASES, "name": "another", "namespace": NAMESPACE},
    {"verb": "create", **LEASES, "namespace": "gpuledger-agent"},
    {"verb": "get", **LEASE, "namespace": "kube-system"},
    {"verb": "escalate", "group": "rbac.authorization.k8s.io", "resource": "roles"},
]


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory,
    own_kube_api: Callable[..., KubeApi],
    kafka_distribution: KafkaDistribution,
    kubectl: Kubectl,
    helm: Helm,
) -> Iterator[Installation]:
    """Install the production preset by the documented commands."""
    refuse_stray_settings()
    folder = tmp_path_factory.mktemp("installation")
    part = SecureKafka(distribution=kafka_distribution, folder=folder / "kafka")
    api = own_kube_api(folder=folder / "kubernetes", demands_accounts=True)
    with running(part) as kafka, running(api):
        assert isinstance(kafka, SecureKafka)
        made = Installation(
            api=api,
            kubectl=Kubectl(binary=kubectl.binary, kubeconfig=api.kubeconfig),
            helm=Helm(binary=helm.binary, kubeconfig=api.kubeconfig),
            folder=folder,
            values=on(kafka),
        )
        made.plain_servers = kafka.plaintext_bootstrap_servers
        copying, *others = documented_commands()
        made.run(copying)
        made.values = fill_in(folder, kafka)
        for script in others:
            made.run(script)
        made.run_topics_job()
        made.play_controllers()
        yield made


def test_the_schemas_of_the_unit_tests_match_the_api_server(
    installation: Installation,
) -> None:
    (file,) = (ROOT / "tests" / "data" / "kubernetes").glob("v*.json")
    _, version = installation.api.request("GET", "/version")
    _, document = installation.api.request("GET", "/openapi/v2")

    assert version["gitVersion"] == file.stem
    assert subset(document["definitions"]) == json.loads(file.read_text())["definitions"]


def test_nothing_that_is_applied_causes_a_warning(installation: Installation) -> None:
    """For example if Pod Security will reject a template, which its controller notices later."""
    assert [printed for printed in installation.printed if "warning" in printed.lower()] == []


def test_everything_that_is_rendered_exists(installation: Installation) -> None:
    api, objects = installation.api, installation.rendering().objects
    missing = [path for path in map(api.path_of, objects) if api.fetch("GET", path).status != 200]

    assert objects
    assert missing == []


def test_upgrading_to_the_same_values_changes_nothing(installation: Installation) -> None:
    before = versions(installation)
    installation.run(documented_commands()[-1].replace("helm install", "helm upgrade"))

    assert versions(installation) == before


def versions(installation: Installation) -> dict[str, str]:
    """Return the version of each object on the API server, by path."""
    paths = map(installation.api.path_of, installation.rendering().objects)
    found = {path: installation.api.request("GET", path)[1] for path in paths}
    return {path: made["metadata"]["resourceVersion"] for path, made in found.items()}


def test_the_pods_of_every_workload_are_admitted_in_its_namespace(
    installation: Installation,
) -> None:
    for workload in installation.rendering().workloads():
        pod = workload.as_pod()
        eventually(lambda pod=pod: installation.admits(pod) == "")  # type: ignore[misc]  # a default is how a loop's value is bound


def test_the_pod_that_closes_bills_is_admitted_in_its_namespace(
    installation: Installation,
) -> None:
    pod = render(installation.values, BILL).workload("gpuledger-bill").as_pod()
    eventually(lambda: installation.admits(pod) == "")


def test_a_pod_that_needs_more_than_restricted_is_admitted_only_in_the_agents_namespace(
    installation: Installation,
) -> None:
    pod = installation.rendering().workload("gpuledger-agent").as_pod()
    pod["metadata"]["namespace"] = NAMESPACE
    refused = installation.admits(pod)

    assert 'violates PodSecurity "restricted:latest"' in refused
    for reason in ("hostPID=true", "restricted volume types", "runAsNonRoot"):
        assert reason in refused


def test_podwatchs_account_may_do_its_work_and_nothing_else(installation: Installation) -> None:
    for attributes in MAY:
        eventually(lambda requested=attributes: installation.may(ACCOUNT, requested))  # type: ignore[misc]  # as above
    too_much = [requested for requested in MAY_NOT if installation.may(ACCOUNT, requested)]

    assert too_much == []


def test_the_account_of_all_other_components_may_do_nothing(installation: Installation) -> None:
    for account in DEFAULT_ACCOUNTS:
        assert [
            requested for requested in (*MAY, *MAY_NOT) if installation.may(account, requested)
        ] == []


def test_the_documented_auth_queries_have_the_documented_answers(
    installation: Installation,
) -> None:
    questions = documented_questions(ACCOUNT)

    assert {answer for _, answer in questions} == {"yes", "no"}
    for question, answer in questions:
        assert can_i(installation.kubectl, question) == answer, question


def test_every_program_starts_as_rendered_and_answers_its_probes(
    installation: Installation,
) -> None:
    """The agent without a GPU and the sinks without their receivers are alive, if not ready."""
    started = {}
    try:
        for workload in installation.rendering().services():
            started[workload.name] = component = installation.start(workload)
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                path = workload.container[name]["httpGet"]["path"]
                eventually(lambda url=f"{component.health}{path}": answers(url))  # type: ignore[misc]  # as above
    finally:
        statuses = {name: component.stop() for name, component in started.items()}

    assert statuses == dict.fromkeys(statuses, 0)


def answers(url: str) -> bool:
    """Return whether a page is there: 200, or 503 if not ready."""
    try:
        return web.fetch(url).status in ({200, 503} if url.endswith("/readyz") else {200})
    except OSError:
        return False


def test_podwatch_leads_and_publishes_with_only_the_rights_of_its_account(
    installation: Installation, kcat: Kcat
) -> None:
    uid = installation.create_pod("research", "trainer")
    installation.api.request("POST", "/api/v1/nodes", {"metadata": {"name": "node-1"}})
    podwatch = installation.start(installation.rendering().workload("gpuledger-podwatch"))
    try:
        podwatch.wait_until_ready()
        eventually(lambda: lease_check(podwatch) == "leading")
        eventually(lambda: f"default/{uid}" in published(installation, kcat, PODS))
        eventually(lambda: "default/research" in published(installation, kcat, NAMESPACES))
        eventually(lambda: "default/node-1" in published(installation, kcat, NODES))
    finally:
        assert podwatch.stop() == 0, podwatch.log_tail()


def lease_check(podwatch: Component) -> str:
    answer = web.fetch(f"{podwatch.health}/readyz")
    detail: str = answer.json()["checks"]["lease"]["detail"]
    return detail if answer.status == 200 else ""


def published(installation: Installation, kcat: Kcat, topic: Topic) -> set[str]:
    """Return the keys on one of podwatch's topics."""
    found = kcat.consume(installation.plain_servers, topic.name)
    return {message.key.decode() for message in found if message.key}
