"""Reads the node's pods from the kubelet's list, for their labels and for shares of GPUs.

The pod-resources socket provides names but no labels and annotations. The kubelet's HTTPS port
provides the pods as API objects, so both come from the node itself, and agents do not query the API
server. Access to that port requires the permission `nodes/pods` since Kubernetes 1.33. Earlier
versions require `nodes/proxy`, which also permits running commands in every pod. Labels and shares
are not worth that risk.

This module has the interface (`PodList`), the parser for its responses, and the loop that queries
the kubelet for all readers of the list. Because any process at that address could respond, a
response is limited in size, and either the whole response is used or nothing.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Final, Protocol

import h11
import msgspec

from gpuledger.certificates import naming, trusting
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import SettingsError, UnavailableError
from gpuledger.runtime import Check, RetryingCaller
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.http.single_request import request_once
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.runtime.tokens import BearerToken
from gpuledger.small_files import read_small_file
from gpuledger.texts import readable, shorten
from gpuledger_agent.host.node_pods import MAX_NAMES, HasCgroup
from gpuledger_agent.metrics import POD_LIST_ERRORS
from gpuledger_agent.settings import KubeletApiSettings

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a response: about four times that of a node with 250 pods of 16 KB each."""
_MIN_NS: Final = NS_PER_SECOND // 2
"""Minimum time between two queries, however many pods are new. It is shorter than a sampling
interval of 1 s, because two ticks may be slightly closer than that."""
_SHOWN_CHARACTERS: Final = 300
_REMEDIES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: (
        "the kubelet rejects the token in kubelet.api.token_file; mount a token of the agent's"
        " service account, and enable authentication.webhook in the kubelet"
    ),
    HTTPStatus.FORBIDDEN: (
        "grant the agent's service account get on nodes/pods, as agent.readKubelet of the Helm"
        " chart does; before Kubernetes 1.33 the kubelet supports only nodes/proxy, which also"
        " permits running commands in every pod, so do not grant it"
    ),
    HTTPStatus.NOT_FOUND: "set kubelet.api.port to the kubelet's HTTPS port",
}


class PodListError(UnavailableError):
    """The kubelet did not return its list of pods; the message has the reason and the remedy."""


class PodList(Protocol):
    """A source of the node's pods as API objects."""

    @property
    def node(self) -> str:
        """The node's name."""

    async def fetch(self) -> bytes:
        """Return a `v1` `PodList` as JSON; raises PodListError."""


class KubeletPodList:
    """Gets the list of the node's pods from the kubelet's HTTPS port."""

    def __init__(self, settings: KubeletApiSettings, *, node: str) -> None:
        self.node = node
        """The node's name."""
        self._settings = settings
        self._url = settings.url_on(node)

    async def fetch(self) -> bytes:
        """Return the node's pods as JSON, over a new connection; raises `PodListError`."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                # Read the files in a thread, because their storage may hang, and for each query,
                # because the kubelet renews the token and the CA certificate may be replaced.
                token, context = await in_daemon_thread(self._read_login)
                headers = {"Authorization": f"Bearer {token.text}", "Accept": "application/json"}
                status, body = await request_once(
                    "GET",
                    self._url,
                    headers | {"User-Agent": "gpuledger-agent"},
                    context=context,
                    max_bytes=MAX_ANSWER_BYTES,
                    server_name=settings.server_name or None,
                )
        except TimeoutError as error:
            raise self._error(f"no answer within {settings.timeout_seconds:g} s") from error
        except SettingsError as error:
            raise self._error(str(error)) from error
        except ssl.SSLCertVerificationError as error:
            raise self._error(
                f"{error.verify_message}; set kubelet.api.ca_file to the CA of the kubelet's"
                " certificate, which is the cluster's CA with serverTLSBootstrap: true, and"
                " kubelet.api.server_name to a name in the certificate"
            ) from error
        except h11.RemoteProtocolError as error:
            raise self._error(f"invalid HTTP response: {readable(str(error))}") from error
        except (OSError, ValueError) as error:
            raise self._error(readable(str(error)) or type(error).__name__) from error
        if status != HTTPStatus.OK:
            raise self._error(self._describe_refusal(status, body, headers))
        return body

    def _read_login(self) -> tuple[BearerToken, ssl.SSLContext]:
        """Read the token and the CA certificates from their files.

        Return the token and a TLS context. Raise `SettingsError` with the setting's name if a file
        is missing or invalid.
        """
        settings = self._settings
        with naming("kubelet.api.token_file", settings.token_file):
            text = read_small_file(settings.token_file).decode("ascii", "replace").strip()
        if not text:
            raise SettingsError(f"kubelet.api.token_file: {settings.token_file} is empty")
        try:
            # Leave the expiry check to the kubelet, because this machine's clock may be wrong.
            token = BearerToken.parse(text, now_seconds=0.0)
        except ValueError as error:
            message = f"kubelet.api.token_file: invalid token in {settings.token_file}"
            raise SettingsError(f"{message}: {error}") from None
        return token, trusting(setting="kubelet.api.ca_file", file=settings.ca_file)[0]

    def _describe_refusal(self, status: int, body: bytes, headers: Mapping[str, str]) -> str:
        sent = BasicCredentials.sent(self._url, headers)
        # Mask the token before shortening, because a shortened token would not be recognized.
        message = shorten(readable(sent.mask(body.decode(errors="replace"))), _SHOWN_CHARACTERS)
        return "; ".join(filter(None, (f"HTTP {status}: {message}", _REMEDIES.get(status, ""))))

    def _error(self, message: str) -> PodListError:
        return PodListError(f"the kubelet at {self._url}: {message}")


class ListedMetadata(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of a listed pod."""

    uid: str
    """The pod's UID."""
    name: str = ""
    """The pod's name."""
    namespace: str = ""
    """The pod's namespace."""
    labels: Mapping[str, str] | None = None
    """The pod's labels."""
    annotations: Mapping[str, str] | None = None
    """The pod's annotations."""
    creation_timestamp: str | None = None
    """The time in UTC at which the pod was created, such as `2026-11-29T08:00:00Z`; absent for
    static pods. Such times sort as texts."""


class ListedResources(msgspec.Struct, frozen=True):
    """The resources of a listed container."""

    limits: Mapping[str, str | int] | None = None
    """Quantities by resource name."""


class ListedContainer(msgspec.Struct, frozen=True):
    """A container of a listed pod."""

    name: str
    """The container's name in the pod."""
    resources: ListedResources = ListedResources()
    """The resources that it may use."""


class ListedSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The specification of a listed pod."""

    node_name: str = ""
    """The pod's node."""
    containers: Sequence[ListedContainer] | None = None
    """The pod's containers, in order."""
    init_containers: Sequence[ListedContainer] | None = None
    """The containers that run before the others, or next to them as sidecars, in order."""


class ListedStatus(msgspec.Struct, frozen=True):
    """The status of a listed pod."""

    phase: str = ""
    """The pod's phase, such as `Running` or `Succeeded`."""


class ListedPod(msgspec.Struct, frozen=True):
    """A pod in the kubelet's list, with the fields that the agent uses."""

    metadata: ListedMetadata
    """Names, labels and annotations."""
    spec: ListedSpec
    """Node and containers."""
    status: ListedStatus = ListedStatus()
    """The pod's phase."""


class _PodList(msgspec.Struct):
    kind: str
    items: Annotated[list[ListedPod], msgspec.Meta(max_length=MAX_NAMES)] | None


_decode: Final = msgspec.json.Decoder(_PodList).decode


def parse_pods(answer: bytes, *, node: str) -> list[ListedPod]:
    """Return the pods in a response of the kubelet.

    Raise `ValueError` if the answer is not a list of pods or contains pods of another node.
    """
    try:
        found = _decode(answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a pod list: {shorten(str(error), _SHOWN_CHARACTERS)}") from error
    if found.kind != "PodList":
        raise ValueError(f"not a PodList: {shorten(readable(found.kind), _SHOWN_CHARACTERS)!r}")
    # Go writes an empty list as null.
    pods = found.items or []
    for pod in pods:
        other = pod.spec.node_name
        if other != node:
            raise ValueError(
                f"pods of node {shorten(readable(other), _SHOWN_CHARACTERS)!r} instead of {node};"
                " set kubelet.api.host to this node's address"
            )
    return pods


class PodListReader(Protocol):
    """A part of the agent that uses the list of pods."""

    def wants_pods(self) -> bool:
        """Return whether the kubelet should be queried soon."""

    def begin_query(self) -> None:
        """Record that a query begins. Its response contains every pod that was wanted until now."""

    def take_pods(self, pods: Sequence[ListedPod]) -> None:
        """Use the pods of a response; called once for each query that succeeds."""


class NodePods:
    """Queries the list of the node's pods, and passes each response to its readers."""

    def __init__(
        self,
        pod_list: PodList,
        readers: Sequence[PodListReader],
        *,
        refresh_seconds: float,
        clock: Clock,
        has_cgroup: HasCgroup = lambda _: False,
    ) -> None:
        """Start without a query; a pod for which `has_cgroup` returns true certainly exists."""
        self._pod_list = pod_list
        self._has_cgroup = has_cgroup
        self._pods: Sequence[ListedPod] = ()
        """The pods of the last response, and running pods that it lacked."""
        self._readers = readers
        self._refresh_ns = round(refresh_seconds * NS_PER_SECOND)
        self._clock = clock
        self._requested_ns: int | None = None
        self._requested = asyncio.Event()
        self._is_idle = True

    def request_if_due(self) -> None:
        """Start a query if it is time for the next one or a reader wants it; call it in each tick.

        No query is started while another one is in progress or being retried.
        """
        if not self._is_idle:
            return
        now_ns = self._clock.monotonic_ns()
        if self._requested_ns is not None:
            is_wanted = any(reader.wants_pods() for reader in self._readers)
            wait_ns = _MIN_NS if is_wanted else self._refresh_ns
            if now_ns - self._requested_ns < wait_ns:
                return
        self._is_idle = False
        self._requested_ns = now_ns
        self._requested.set()

    async def run(self, check: Check) -> None:
        """Make the queries that ticks have requested, until cancelled."""
        fetch = RetryingCaller(
            on=PodListError,
            check=check,
            receiver="the kubelet lists the node's pods",
            counter=POD_LIST_ERRORS,
            clock=self._clock,
        )
        while True:
            await self._requested.wait()
            self._requested.clear()
            await fetch(self._refresh)
            self._is_idle = True

    async def _refresh(self) -> None:
        for reader in self._readers:
            reader.begin_query()
        try:
            pods = parse_pods(await self._pod_list.fetch(), node=self._pod_list.node)
        except ValueError as error:
            raise PodListError(f"invalid response from the kubelet: {error}") from error
        # A starting kubelet lists no pods, or only static pods, until it has read its pods from the
        # API server. Until then, keep the pods that still run.
        listed = {pod.metadata.uid for pod in pods}
        missing = (pod for pod in self._pods if pod.metadata.uid not in listed)
        pods += [pod for pod in missing if self._has_cgroup(pod.metadata.uid)]
        self._pods = pods
        for reader in self._readers:
            reader.take_pods(pods)
