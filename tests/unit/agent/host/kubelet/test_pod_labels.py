"""Labels of pods: the request to the kubelet's HTTPS port, and the checks of its response."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gpuledger.runtime import Check
from gpuledger.runtime.tasks import run_tasks
from gpuledger_agent.host.kubelet.pod_labels import (
    MAX_DCGM_LABELS,
    PodLabels,
    select_dcgm_labels,
    select_labels,
)
from gpuledger_agent.host.kubelet.pod_list import (
    MAX_ANSWER_BYTES,
    KubeletPodList,
    NodePods,
    PodListError,
    parse_pods,
)
from gpuledger_agent.host.node_pods import MAX_NAMES
from gpuledger_agent.settings import KubeletApiSettings
from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.simulation import open_simulation
from tests.errors import has_words
from tests.fakes.kubelet_api import FakeKubeletApi, pod, pod_list
from tests.real.services.certificates import Authority
from tests.unit.deployment.components import ROOT

NODE = "node-1"
NAMES = ("team", "app.kubernetes.io/name")


def parse(answer: object, names: Sequence[str] = NAMES) -> dict[str, Any]:
    written = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return dict(select_labels(parse_pods(written, node=NODE), names))


def test_a_pod_has_its_chosen_labels_under_the_names_of_kube_state_metrics() -> None:
    first = pod("1", **{"team": "vision", "app.kubernetes.io/name": "chat", "tier": "gold"})
    assert parse(pod_list(first, pod("2"), pod("3", team="speech"))) == {
        "1": (("label_team", "vision"), ("label_app_kubernetes_io_name", "chat")),
        "2": (),
        "3": (("label_team", "speech"),),
    }


@pytest.mark.parametrize(
    ("patterns", "shown"),
    [
        ([], {"app_kubernetes_io_name": "chat", "team": "vision", "tier": "gold"}),
        (["^team$"], {"team": "vision"}),
        (["^app\\.kubernetes\\.io/", "^ti"], {"app_kubernetes_io_name": "chat", "tier": "gold"}),
        (["ea"], {"team": "vision"}),
        (["^nothing$"], {}),
    ],
)
def test_dcgm_exporters_patterns_select_labels_under_their_own_names(
    patterns: list[str], shown: dict[str, str]
) -> None:
    labels = {"team": "vision", "app.kubernetes.io/name": "chat", "tier": "gold", "1st": "x"}
    pods = parse_pods(json.dumps(pod_list(pod("1", **labels), pod("2"))).encode(), node=NODE)
    found = select_dcgm_labels(pods, [re.compile(one) for one in patterns])
    assert found == {"1": tuple(shown.items()), "2": ()}


def test_equal_and_excess_labels_of_dcgm_exporter_are_left_out() -> None:
    labels = {"a.b": "first", "a/b": "second"} | {f"x{i:03}": "y" for i in range(MAX_DCGM_LABELS)}
    pods = parse_pods(json.dumps(pod_list(pod("1", **labels))).encode(), node=NODE)
    (found,) = select_dcgm_labels(pods, []).values()
    assert found[0] == ("a_b", "first")
    assert len(found) == MAX_DCGM_LABELS


def test_a_node_without_pods_has_a_list_without_items() -> None:
    assert parse(pod_list()) == {}


@pytest.mark.parametrize(
    ("value", "is_shown"),
    [
        ("v" * 63, True),
        ("a.b_c-D9", True),
        ("v", True),
        ("v" * 64, False),
        ("v" * 100_000, False),
        ("", False),
        ("two words", False),
        ("-x", False),
        ("x\n", False),
        ('x"} 1', False),
        ("\ud800", False),
    ],
)
def test_an_invalid_label_value_is_left_out(value: str, *, is_shown: bool) -> None:
    shown = (("label_team", value),) if is_shown else ()
    try:
        assert parse(pod_list(pod("1", team=value))) == {"1": shown}
    except ValueError:
        assert not is_shown


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", ["not a pod list"]),
        (b"<html>", ["not a pod list"]),
        (b"[1]", ["not a pod list", "object"]),
        (b"\xff\xfe", ["not a pod list"]),
        (b'{"kind":"PodList","items":[' * 40_000, ["not a pod list"]),
        (b'{"kind":"PodList","x":' + b"[" * 100_000, ["not a pod list"]),
        ({"kind": "Status", "items": []}, ["'Status'", "not a PodList"]),
        ({"kind": "PodList", "items": [{"spec": {}}]}, ["metadata"]),
        (pod_list(pod("1"), pod("2", node="node-7")), ["'node-7'", NODE, "kubelet.api.host"]),
        (pod_list(pod("1", node="")), ["''", NODE]),
        (pod_list(*(pod(str(one)) for one in range(MAX_NAMES + 1))), [str(MAX_NAMES)]),
        (pod_list(pod("1", node="x" * 100_000)), ["xxx…"]),
    ],
    ids=[
        "nothing",
        "a page",
        "a list",
        "no text",
        "broken off",
        "deep",
        "another kind",
        "a pod without metadata",
        "another node's",
        "no node's",
        "too many",
        "a long name",
    ],
)
def test_a_response_that_is_not_a_list_of_this_nodes_pods_is_rejected(
    answer: object, words: list[str]
) -> None:
    with pytest.raises(ValueError, check=has_words(*words)) as caught:  # see `check`
        parse(answer)
    assert len(str(caught.value)) < 800


async def test_the_simulators_list_matches_the_schema_of_kubernetes() -> None:
    simulation = open_simulation(ROOT / "scenarios" / "quickstart.yaml")
    node = next(iter(simulation.nodes.values()))
    answer = json.loads(await node.pod_list.fetch())
    document = json.loads((ROOT / "tests/data/kubernetes/v1.36.3.json").read_text())

    def errors(kind: str, found: object) -> list[str]:
        reference = {"$ref": f"#/definitions/{kind}", "definitions": document["definitions"]}
        return [error.message for error in Draft202012Validator(reference).iter_errors(found)]

    assert {*answer} == {"kind", "apiVersion", "metadata", "items"}
    assert answer["items"]
    for item in [*answer["items"], pod("1", team="vision")]:
        assert {*item} == {"metadata", "spec", "status"}
        meta = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
        assert errors(meta, item["metadata"]) == []
        assert errors("io.k8s.api.core.v1.PodSpec", item["spec"]) == []


class Port:
    """A kubelet's port with a certificate, and the agent's files and settings for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder=folder / "authority")
        self.token_file, self.ca_file = folder / "token", folder / "ca.crt"
        self.token_file.write_text("first-token\n")
        self.ca_file.write_bytes(self.authority.certificate.read_bytes())
        self.api = FakeKubeletApi(pod_list(pod("1", team="vision")))

    @asynccontextmanager
    async def requests(
        self,
        *,
        host: str | None = None,
        **settings: Any,  # noqa: ANN401  # of any type
    ) -> AsyncIterator[KubeletPodList]:
        async with self.api.serve(self.authority.issue("kubelet", host=host)) as port:
            chosen = KubeletApiSettings(
                **{
                    "host": "127.0.0.1",
                    "port": port,
                    "ca_file": self.ca_file,
                    "token_file": self.token_file,
                    **settings,
                }
            )
            yield KubeletPodList(chosen, node=NODE)

    async def refusal(self, **settings: Any) -> str:  # noqa: ANN401  # of any type
        """Return the error of a failed request."""
        async with self.requests(**settings) as kubelet:
            with pytest.raises(PodListError) as caught:
                await kubelet.fetch()
        return str(caught.value)


@pytest.fixture
def port(tmp_path: Path) -> Port:
    return Port(tmp_path)


async def test_each_request_has_the_current_token(port: Port) -> None:
    async with port.requests() as kubelet:
        assert parse(await kubelet.fetch()) == {"1": (("label_team", "vision"),)}
        port.token_file.write_text("second-token")
        await kubelet.fetch()
    shown = [headers["authorization"] for _, headers in port.api.requests]
    assert shown == ["Bearer first-token", "Bearer second-token"]
    assert {first for first, _ in port.api.requests} == {"GET /pods HTTP/1.1"}


async def test_the_next_request_trusts_a_replaced_ca_file(port: Port) -> None:
    other = Authority(folder=port.folder / "other")
    port.ca_file.write_bytes(other.certificate.read_bytes())
    async with port.requests() as kubelet:
        with pytest.raises(PodListError, check=has_words("kubelet.api.ca_file", "serverTLS")):
            await kubelet.fetch()
        assert port.api.requests == [], "the token has not been sent"
        port.ca_file.write_bytes(port.authority.certificate.read_bytes())
        await kubelet.fetch()


async def test_a_certificate_must_name_the_host_or_the_configured_server_name(port: Port) -> None:
    refused = await port.refusal(host="node-1.internal")
    assert "kubelet.api.server_name" in refused
    async with port.requests(host="node-1.internal", server_name="node-1.internal") as kubelet:
        assert parse(await kubelet.fetch())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, ["HTTP 401", "kubelet.api.token_file", "authentication.webhook"]),
        (403, ["HTTP 403", "nodes/pods", "agent.readKubelet", "1.33"]),
        (404, ["HTTP 404", "kubelet.api.port"]),
        (500, ["HTTP 500"]),
        (302, ["HTTP 302"]),
    ],
)
async def test_a_refusal_names_the_remedy(port: Port, status: int, words: list[str]) -> None:
    port.api.authorize = lambda token: (status, f"no: {token} {'x' * 5000}")
    refused = await port.refusal()
    assert [word for word in words if word not in refused] == []
    assert "first-token" not in refused
    assert len(refused) < 1000


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", ["without an answer"]),
        (b"\x00\x01 what\r\n\r\n", ["invalid HTTP response"]),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, ["invalid HTTP response"]),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort", ["invalid HTTP response"]),
    ],
    ids=["nothing", "no HTTP", "an endless head", "broken off"],
)
async def test_a_response_that_is_not_http_is_rejected(
    port: Port, raw: bytes, words: list[str]
) -> None:
    port.api.raw = raw
    port.api.closes = True
    refused = await port.refusal()
    assert [word for word in words if word not in refused] == []


async def test_an_endless_response_is_aborted(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    port.api.raw = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_ANSWER_BYTES + 1)
    assert f"more than {MAX_ANSWER_BYTES // 1024} KiB" in await port.refusal()


async def test_a_request_without_an_answer_times_out(port: Port) -> None:
    port.api.hangs = True
    assert "no answer within 0.2 s" in await port.refusal(timeout_seconds=0.2)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("token_file", None, ["kubelet.api.token_file", "cannot read"]),
        ("token_file", "", ["kubelet.api.token_file", "empty"]),
        ("token_file", "a\nHost: b", ["kubelet.api.token_file", "invalid token"]),
        ("ca_file", None, ["kubelet.api.ca_file"]),
        ("ca_file", "no PEM", ["kubelet.api.ca_file", "PEM"]),
    ],
)
async def test_an_unusable_file_is_named(
    port: Port, file: str, content: str | None, words: list[str]
) -> None:
    path = getattr(port, file)
    path.unlink()
    if content is not None:
        path.write_text(content)
    refused = await port.refusal()
    assert [word for word in words if word not in refused] == []
    assert "Host: b" not in refused


async def test_the_error_names_an_address_without_a_listener(port: Port) -> None:
    async with port.requests() as kubelet:
        pass
    with pytest.raises(PodListError, check=has_words("https://127.0.0.1:", "/pods")):
        await kubelet.fetch()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "https://node-1:10250/pods"),
        ("10.1.2.3", "https://10.1.2.3:10250/pods"),
        ("fd00::1", "https://[fd00::1]:10250/pods"),
    ],
)
def test_the_node_is_queried_by_its_name_or_its_address(host: str, url: str) -> None:
    assert KubeletApiSettings(host=host).url_on(NODE) == url


@pytest.mark.parametrize("host", ["a/b", "user@node", "node:1", "[::1]", "a b", "-a", "a" * 300])
def test_an_invalid_host_is_rejected(host: str) -> None:
    with pytest.raises(ValueError, match="host: expected an IP address or a host's name"):
        KubeletApiSettings(host=host)


class FakePodList:
    """Answers or fails as a test sets, and counts requests."""

    node = NODE

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.answer: dict[str, Any] | str = pod_list(*pods)
        self.requested_seconds: list[float] = []
        self.clock = ManualClock(start_ns=0)

    async def fetch(self) -> bytes:
        self.requested_seconds.append(self.clock.monotonic_ns() / 1e9)
        if isinstance(self.answer, str):
            raise PodListError(self.answer)
        return json.dumps(self.answer).encode()


class Following:
    """Labels that follow a list of pods, on their own clock."""

    def __init__(self, listed: FakePodList, *, refresh_seconds: float = 30.0) -> None:
        self.listed = listed
        self.check = Check()
        self.labels = PodLabels(("team",))
        self.cgroups: set[str] = set()
        self.pods = NodePods(
            listed,
            [self.labels],
            refresh_seconds=refresh_seconds,
            clock=listed.clock,
            has_cgroup=lambda uid: uid in self.cgroups,
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        async with run_tasks(self.pods.run(self.check)):
            yield

    def is_ok(self) -> bool:
        return self.check.is_ok

    async def wait_requested(self, number: int) -> None:
        """Wait for this number of requests; an agent makes a tick in each second."""
        for _ in range(2000):
            if len(self.listed.requested_seconds) >= number:
                break
            self.pods.request_if_due()
            for _ in range(5):
                await asyncio.sleep(0)
            if len(self.listed.requested_seconds) < number:
                self.listed.clock.advance(1)
        assert len(self.listed.requested_seconds) >= number
        await asyncio.sleep(0)


async def test_the_kubelet_is_queried_periodically() -> None:
    following = Following(FakePodList(pod("1", team="vision")))
    async with following.run():
        await following.wait_requested(3)
        assert following.labels.labels_of("1") == (("label_team", "vision"),)
    first, second, third = following.listed.requested_seconds[:3]
    assert (first, second - first, third - second) == (0, 30, 30)


async def test_labels_of_a_pod_that_is_new_on_a_gpu_are_requested_within_a_second() -> None:
    following = Following(FakePodList())
    async with following.run():
        await following.wait_requested(1)
        following.listed.answer = pod_list(pod("1", team="vision"))
        assert following.labels.labels_of("1") == ()
        await following.wait_requested(2)
        assert following.labels.labels_of("1") == (("label_team", "vision"),)
    assert following.listed.requested_seconds[1] <= 2


async def test_a_pod_missing_from_the_list_does_not_cause_a_request_every_second() -> None:
    following = Following(FakePodList())
    async with following.run():
        for number in range(2, 8):
            following.labels.labels_of("gone")
            await following.wait_requested(number)
    seconds = following.listed.requested_seconds
    assert seconds[6] - seconds[0] >= 60, seconds


async def test_labels_are_kept_while_the_kubelet_is_unavailable_and_the_check_fails() -> None:
    following = Following(FakePodList(pod("1", team="vision")))
    async with following.run():
        await following.wait_requested(1)
        assert following.is_ok()
        following.listed.answer = "the kubelet at https://node-1: away"
        await following.wait_requested(4)
        assert not following.is_ok()
        assert "away" in following.check.detail
        assert following.labels.labels_of("1") == (("label_team", "vision"),)
        following.listed.answer = pod_list(pod("1", team="speech"))
        await following.wait_requested(len(following.listed.requested_seconds) + 1)
        assert following.is_ok()
        assert following.labels.labels_of("1") == (("label_team", "speech"),)


async def test_labels_of_a_running_pod_are_kept_while_the_kubelet_does_not_list_it() -> None:
    following = Following(FakePodList(pod("1", team="vision")))
    following.cgroups = {"1"}
    async with following.run():
        await following.wait_requested(1)
        following.listed.answer = pod_list(pod("2", team="speech"))
        await following.wait_requested(3)
        assert following.labels.labels_of("1") == (("label_team", "vision"),)
        assert following.labels.labels_of("2") == (("label_team", "speech"),)
        following.cgroups = set()
        await following.wait_requested(4)
        assert following.labels.labels_of("1") == ()


async def test_a_rejected_response_changes_nothing() -> None:
    following = Following(FakePodList(pod("1", team="vision")))
    async with following.run():
        await following.wait_requested(1)
        following.listed.answer = pod_list(pod("1", team="evil", node="node-7"))
        await following.wait_requested(3)
        assert "node-7" in following.check.detail
        assert following.labels.labels_of("1") == (("label_team", "vision"),)
