"""Reads the labels of the node's pods from the kubelet's list of pods.

The pod-resources socket provides names but no labels. The kubelet's HTTPS port provides the pods as
API objects, so labels come from the node itself, and agents do not query the API server. Access to
that port requires the permission `nodes/pods` since Kubernetes 1.33. Earlier versions require
`nodes/proxy`, which also permits running commands in every pod; labels are not worth that risk.

This module has the interface (`PodList`), the parser for its responses, and the loop that queries
the kubelet. Because any process at that address could respond, a response is limited in size, and
either the whole response is used or nothing. Labels are stored by pod UID and kept until the next
response, so series do not change while the kubelet is unavailable.
"""

import asyncio
import re
import ssl
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from http import HTTPStatus
from typing import Annotated, Final, Protocol

import h11
import msgspec

from gpuledger.certificates import naming, trusting
from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import SettingsError, UnavailableError
from gpuledger.ledger.series import label_of
from gpuledger.records.bounds import MAX_LABEL_LENGTH
from gpuledger.runtime import Check, RetryingCaller
from gpuledger.runtime.http.credentials import BasicCredentials
from gpuledger.runtime.http.single_request import request_once
from gpuledger.runtime.tasks import in_daemon_thread
from gpuledger.runtime.tokens import BearerToken
from gpuledger.small_files import read_small_file
from gpuledger.texts import readable, shorten
from gpuledger_agent.host.node_pods import MAX_NAMES
from gpuledger_agent.metrics import POD_LIST_ERRORS
from gpuledger_agent.settings import KubeletApiSettings

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a response: about four times that of a node with 250 pods of 16 KB each."""
MIN_SECONDS: Final = 1.0
"""Minimum time between two queries, however many pods are new."""
_SHOWN_CHARACTERS: Final = 300
_REMEDIES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: (
        "the kubelet rejects the token in kubelet.api.token_file; mount a token of the agent's"
        " service account, and enable authentication.webhook in the kubelet"
    ),
    HTTPStatus.FORBIDDEN: (
        "grant the agent's service account get on nodes/pods, as k8s/components/agent-pod-labels"
        " does; before Kubernetes 1.33 the kubelet supports only nodes/proxy, which also permits"
        " running commands in every pod, so do not use exposition.pod_labels there"
    ),
    HTTPStatus.NOT_FOUND: "set kubelet.api.port to the kubelet's HTTPS port",
}
# The API server's rules for label values, so that no value is longer or has other characters.
_VALUE: Final = re.compile(rf"[A-Za-z0-9]([-A-Za-z0-9_.]{{0,{MAX_LABEL_LENGTH - 2}}}[A-Za-z0-9])?")

Labels = Sequence[tuple[str, str]]
"""Names and values of labels to add to a pod's series."""


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
        return token, trusting(setting="kubelet.api.ca_file", file=settings.ca_file)

    def _describe_refusal(self, status: int, body: bytes, headers: Mapping[str, str]) -> str:
        sent = BasicCredentials.sent(self._url, headers)
        # Mask the token before shortening, because a shortened token would not be recognized.
        message = shorten(readable(sent.mask(body.decode(errors="replace"))), _SHOWN_CHARACTERS)
        return "; ".join(filter(None, (f"HTTP {status}: {message}", _REMEDIES.get(status, ""))))

    def _error(self, message: str) -> PodListError:
        return PodListError(f"the kubelet at {self._url}: {message}")


class _Metadata(msgspec.Struct):
    uid: str
    labels: dict[str, str] | None = None


class _Spec(msgspec.Struct):
    node_name: str = msgspec.field(name="nodeName", default="")


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: _Spec


class _PodList(msgspec.Struct):
    kind: str
    items: Annotated[list[_Pod], msgspec.Meta(max_length=MAX_NAMES)] | None


_decode: Final = msgspec.json.Decoder(_PodList).decode


def parse_pods(answer: bytes, *, node: str, names: Sequence[str]) -> dict[str, Labels]:
    """Return the labels to add to each pod's series, by pod UID.

    `names` are the names of these labels in Kubernetes; the returned names are those in series.
    Values that are not valid in Kubernetes are left out. Raise `ValueError` if the answer is not a
    list of pods or contains pods of another node.
    """
    try:
        found = _decode(answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a pod list: {shorten(str(error), _SHOWN_CHARACTERS)}") from error
    if found.kind != "PodList":
        raise ValueError(f"not a PodList: {shorten(readable(found.kind), _SHOWN_CHARACTERS)!r}")
    chosen = [(name, label_of(name)) for name in names]
    pods: dict[str, Labels] = {}
    # Go writes an empty list as null.
    for pod in found.items or ():
        other = pod.spec.node_name
        if other != node:
            raise ValueError(
                f"pods of node {shorten(readable(other), _SHOWN_CHARACTERS)!r} instead of {node};"
                " set kubelet.api.host to this node's address"
            )
        labels = pod.metadata.labels or {}
        pods[pod.metadata.uid] = tuple(
            (label, value)
            for name, label in chosen
            if (value := labels.get(name)) and _VALUE.fullmatch(value)
        )
    return pods


class PodLabels:
    """Queries the labels of the node's pods, and returns those of the last response."""

    def __init__(
        self, pod_list: PodList, *, names: Sequence[str], refresh_seconds: float, clock: Clock
    ) -> None:
        """Start without labels; `names` are the Kubernetes names of the labels to return."""
        self._pod_list = pod_list
        self._names = names
        self._refresh_ns = round(refresh_seconds * NS_PER_SECOND)
        self._clock = clock
        self._labels: Mapping[str, Labels] = {}
        self._wanted: set[str] = set()
        self._not_listed: AbstractSet[str] = frozenset()

    def labels_of(self, pod_uid: str) -> Labels:
        """Return the labels to add to a pod's series.

        If the pod is unknown, return no labels, and let `run` query the kubelet soon.
        """
        known = self._labels.get(pod_uid)
        if known is not None:
            return known
        if pod_uid not in self._not_listed and len(self._wanted) < MAX_NAMES:
            self._wanted.add(pod_uid)
        return ()

    async def run(self, check: Check) -> None:
        """Query the kubelet until cancelled, periodically and if labels of a new pod are needed."""
        fetch = RetryingCaller(
            on=PodListError,
            check=check,
            receiver="the kubelet lists the node's pods",
            counter=POD_LIST_ERRORS,
            clock=self._clock,
        )
        while True:
            await fetch(self._refresh)
            requested_ns = self._clock.monotonic_ns()
            await self._clock.sleep(MIN_SECONDS)
            while not self._wanted and self._clock.monotonic_ns() - requested_ns < self._refresh_ns:
                await self._clock.sleep(MIN_SECONDS)

    async def _refresh(self) -> None:
        wanted, self._wanted = self._wanted, set()
        try:
            answer = await self._pod_list.fetch()
            labels = parse_pods(answer, node=self._pod_list.node, names=self._names)
        except ValueError as error:
            raise PodListError(f"invalid response from the kubelet: {error}") from error
        # Pods that the kubelet does not list are not queried again before the next regular query.
        self._not_listed = wanted - labels.keys()
        self._labels = labels
