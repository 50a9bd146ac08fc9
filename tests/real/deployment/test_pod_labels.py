"""`agent.readKubelet` on a real API server: its permissions, and an agent with only those.

No kubelet runs here. A port replaces it and does the same with a request for its pods: it asks the
API server whose token it is (TokenReview) and whether that user may `get` `nodes/pods`, else
`nodes/proxy` (SubjectAccessReview). It answers with the API server's own objects of that node's
pods, a `v1` `PodList` as JSON.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.fakes.kubelet_api import FakeKubeletApi
from tests.real.deployment.chart import BROKERS, POD_LABELS, merged
from tests.real.deployment.installation import (
    Installation,
    can_i,
    documented_questions,
    eventually,
)
from tests.real.deployment.rendering import FIELDS
from tests.real.deployment.test_cluster import MAY_NOT
from tests.real.end_to_end.components import refuse_stray_settings
from tests.real.services.certificates import Authority
from tests.real.services.cluster_tools import Helm, Kubectl
from tests.real.services.starter import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.end_to_end.components import Component
    from tests.real.services.kubernetes import KubeApi

AGENT = "gpuledger-agent"
ACCOUNT = f"system:serviceaccount:{AGENT}:{AGENT}"
NODE = FIELDS["spec.nodeName"]
PODS = {"verb": "get", "resource": "nodes", "subresource": "pods", "name": NODE}
TOO_MUCH: list[dict[str, str]] = [
    *MAY_NOT,
    *(
        {"verb": verb, "resource": "nodes", "subresource": subresource, "name": NODE}
        for subresource in ("proxy", "log", "stats", "metrics", "spec", "checkpoint", "configz")
        for verb in ("get", "create")
    ),
    *({"verb": verb, "resource": "nodes"} for verb in ("get", "list", "watch")),
    *({"verb": verb, "resource": "pods"} for verb in ("get", "list", "watch")),
    *({**PODS, "verb": verb} for verb in ("create", "update", "delete")),
]


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory,
    own_kube_api: Callable[..., KubeApi],
    kubectl: Kubectl,
    helm: Helm,
) -> Iterator[Installation]:
    """Install with this value; it needs no running brokers."""
    refuse_stray_settings()
    folder = tmp_path_factory.mktemp("pod-labels")
    api = own_kube_api(folder=folder / "kubernetes", demands_accounts=True)
    with running(api):
        made = Installation(
            api=api,
            kubectl=Kubectl(binary=kubectl.binary, kubeconfig=api.kubeconfig),
            helm=Helm(binary=helm.binary, kubeconfig=api.kubeconfig),
            folder=folder,
            values=merged(BROKERS, POD_LABELS),
        )
        made.install()
        made.play_controllers()
        yield made


def test_the_agents_account_may_read_a_kubelets_pods_and_nothing_else(
    installation: Installation,
) -> None:
    eventually(lambda: installation.may(ACCOUNT, PODS))

    assert [requested for requested in TOO_MUCH if installation.may(ACCOUNT, requested)] == []


def test_the_documented_auth_queries_about_the_agents_account_have_the_documented_answers(
    installation: Installation,
) -> None:
    eventually(lambda: installation.may(ACCOUNT, PODS))
    questions = documented_questions(ACCOUNT)

    assert {answer for _, answer in questions} == {"yes", "no"}
    assert [can_i(installation.kubectl, question) for question, _ in questions] == [
        answer for _, answer in questions
    ]


def test_the_agents_pod_is_admitted_with_its_account(installation: Installation) -> None:
    pod = installation.rendering().workload(AGENT).as_pod()
    eventually(lambda: installation.admits(pod) == "")


def authorizer(api: KubeApi) -> Callable[[str], tuple[int, str]]:
    """Return a function that reviews a token as a kubelet does."""

    def create_review(group: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        status, found = api.request("POST", f"/apis/{group}.k8s.io/v1/{kind}", {"spec": spec})
        assert status == 201, found
        answer: dict[str, Any] = found["status"]
        return answer

    def authorize(token: str) -> tuple[int, str]:
        review = create_review("authentication", "tokenreviews", {"token": token})
        if not review.get("authenticated"):
            return 401, "Unauthorized"
        user = review["user"]["username"]
        for subresource in ("pods", "proxy"):
            wanted = {"user": user, "resourceAttributes": {**PODS, "subresource": subresource}}
            if create_review("authorization", "subjectaccessreviews", wanted).get("allowed"):
                return 200, ""
        message = f"user={user}, verb=get, resource=nodes, subresource(s)=[pods proxy]"
        return 403, f"Forbidden ({message})"

    return authorize


async def test_the_agent_reads_the_nodes_pods_with_only_the_rights_of_its_account(
    installation: Installation, tmp_path: Path
) -> None:
    api = installation.api
    uid = installation.create_pod("research", "trainer")
    status, listed = api.request("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={NODE}")
    assert (status, listed["kind"]) == (200, "PodList")
    assert [item["metadata"]["uid"] for item in listed["items"]] == [uid]
    kubelet = FakeKubeletApi(listed)
    kubelet.authorize = authorizer(api)
    authority = Authority(folder=tmp_path)
    async with kubelet.serve(authority.issue("kubelet")) as port:
        agent = await asyncio.to_thread(start_agent, installation, port)
        try:
            await asyncio.to_thread(write_login, installation, authority)
            await asyncio.to_thread(eventually, lambda: check_of(agent)[0])
            right = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/gpuledger-agent"
            assert (await asyncio.to_thread(api.request, "DELETE", right))[0] == 200
            await asyncio.to_thread(eventually, lambda: not check_of(agent)[0])
            assert "get on nodes/pods" in (await asyncio.to_thread(check_of, agent))[1]
        finally:
            assert await asyncio.to_thread(agent.stop) == 0, agent.log_tail()


def start_agent(installation: Installation, port: int) -> Component:
    """Start the agent as rendered, except for the port and brokers that do not exist here."""
    installation.overridden = {
        "GPULEDGER_KUBELET__API__PORT": str(port),
        "GPULEDGER_KUBELET__API__REFRESH_SECONDS": "1",
        "GPULEDGER_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:9",
    }
    return installation.start(installation.rendering().workload(AGENT))


def write_login(installation: Installation, authority: Authority) -> None:
    """Write the files that a kubelet writes into the pod's volume while the agent runs."""
    folder = installation.folder / AGENT / "run" / "secrets" / "kubelet"
    (folder / "ca.crt").write_bytes(authority.certificate.read_bytes())
    (folder / "token").write_text(installation.api.token_of(namespace=AGENT, name=AGENT))


def check_of(agent: Component) -> tuple[bool, str]:
    """Return the state and detail of the check of pod labels."""
    try:
        check = agent.readyz()["checks"]["pod_labels"]
    except (OSError, KeyError):
        return False, ""
    return check["ok"], check["detail"]
