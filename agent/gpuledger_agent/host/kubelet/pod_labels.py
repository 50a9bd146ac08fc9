"""The labels of the node's pods, from the kubelet's own list of them.

The pod-resources socket gives names and no labels. The kubelet's HTTPS port has the pods as objects
of the API, so labels come from the node itself and no agent asks the API server. That port lets in
who has a right: `nodes/pods` since Kubernetes 1.33. Before that it is `nodes/proxy`, whose holder
may run commands in every pod, and which no label is worth.

Here lives the seam (`PodList`), what is read of its answer, and the loop over it. An answer is what
anybody sends who has that address: it is bounded, and used as a whole or not at all. Labels are
known by a pod's UID and stand until the next answer, so that a kubelet that is away for a while
changes no series.
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
"""Some four times what a node with 250 pods of 16 KB each answers."""
MIN_SECONDS: Final = 1.0
"""Between two questions, however many pods are new."""
_SHOWN_CHARACTERS: Final = 300
_REMEDIES: Final[Mapping[int, str]] = {
    HTTPStatus.UNAUTHORIZED: (
        "it does not take the token in kubelet.api.token_file: mount one of the agent's service"
        " account, and let the kubelet ask the API server (authentication.webhook)"
    ),
    HTTPStatus.FORBIDDEN: (
        "grant the agent's service account get on nodes/pods, as k8s/components/agent-pod-labels"
        " does; before Kubernetes 1.33 the kubelet knows nodes/proxy alone, which lets its holder"
        " run commands in every pod: do without exposition.pod_labels there"
    ),
    HTTPStatus.NOT_FOUND: "is kubelet.api.port the kubelet's HTTPS port?",
}
# As the API server holds them to; so no value needs more bytes or other characters on the page.
_VALUE: Final = re.compile(rf"[A-Za-z0-9]([-A-Za-z0-9_.]{{0,{MAX_LABEL_LENGTH - 2}}}[A-Za-z0-9])?")

Labels = Sequence[tuple[str, str]]
"""Names and values of a series' labels."""


class PodListError(UnavailableError):
    """The kubelet did not list the node's pods; the message says why and what would help."""


class PodList(Protocol):
    """Who has the node's pods as objects of the API."""

    @property
    def node(self) -> str:
        """The name of the node whose pods they are."""

    async def fetch(self) -> bytes:
        """Return a `v1` `PodList` as JSON; raises PodListError."""


class KubeletPodList:
    """The kubelet at its HTTPS port."""

    def __init__(self, settings: KubeletApiSettings, *, node: str) -> None:
        self.node = node
        """The name of the node whose pods they are."""
        self._settings = settings
        self._url = settings.url_on(node)

    async def fetch(self) -> bytes:
        """Return the node's pods, over a connection of its own; raises PodListError."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.timeout_seconds):
                # In a thread, as files may be on a storage that does not answer; for each question,
                # as the kubelet renews the token, and an authority may be exchanged.
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
                f"{error.verify_message}; kubelet.api.ca_file has to have the authority of the"
                " kubelet's certificate, which is the cluster's with serverTLSBootstrap: true, and"
                " kubelet.api.server_name a name in it"
            ) from error
        except h11.RemoteProtocolError as error:
            raise self._error(f"no valid HTTP: {readable(str(error))}") from error
        except (OSError, ValueError) as error:
            raise self._error(readable(str(error)) or type(error).__name__) from error
        if status != HTTPStatus.OK:
            raise self._error(self._describe_refusal(status, body, headers))
        return body

    def _read_login(self) -> tuple[BearerToken, ssl.SSLContext]:
        """Return the token and the trust of now; raises SettingsError naming the setting."""
        settings = self._settings
        with naming("kubelet.api.token_file", settings.token_file):
            text = read_small_file(settings.token_file).decode("ascii", "replace").strip()
        if not text:
            raise SettingsError(f"kubelet.api.token_file: {settings.token_file} is empty")
        try:
            # Whether it has expired is the kubelet's to say: this clock may be wrong.
            token = BearerToken.parse(text, now_seconds=0.0)
        except ValueError as error:
            message = f"kubelet.api.token_file: the token in {settings.token_file} cannot be used"
            raise SettingsError(f"{message}: {error}") from None
        return token, trusting(setting="kubelet.api.ca_file", file=settings.ca_file)

    def _describe_refusal(self, status: int, body: bytes, headers: Mapping[str, str]) -> str:
        sent = BasicCredentials.sent(self._url, headers)
        # Masked before it is cut: a token of which a part is left would not be found.
        message = shorten(readable(sent.mask(body.decode(errors="replace"))), _SHOWN_CHARACTERS)
        return "; ".join(filter(None, (f"answered {status}: {message}", _REMEDIES.get(status, ""))))

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
    """Return the chosen labels of each pod, as series have them, by its UID.

    A value that no label in Kubernetes can have is left out. Raises ValueError where the answer is
    no list of pods, or has pods of another node.
    """
    try:
        found = _decode(answer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"no list of pods: {shorten(str(error), _SHOWN_CHARACTERS)}") from error
    if found.kind != "PodList":
        raise ValueError(f"a {shorten(readable(found.kind), _SHOWN_CHARACTERS)!r}, no PodList")
    chosen = [(name, label_of(name)) for name in names]
    pods: dict[str, Labels] = {}
    # An empty list has no items in Go's JSON.
    for pod in found.items or ():
        other = pod.spec.node_name
        if other != node:
            raise ValueError(
                f"pods of the node {shorten(readable(other), _SHOWN_CHARACTERS)!r}, not of {node};"
                " kubelet.api.host has to be this node's own address"
            )
        labels = pod.metadata.labels or {}
        pods[pod.metadata.uid] = tuple(
            (label, value)
            for name, label in chosen
            if (value := labels.get(name)) and _VALUE.fullmatch(value)
        )
    return pods


class PodLabels:
    """The chosen labels of the node's pods, by the kubelet's last answer."""

    def __init__(
        self, pod_list: PodList, *, names: Sequence[str], refresh_seconds: float, clock: Clock
    ) -> None:
        """Take the labels' names in Kubernetes, and the time from one question to the next."""
        self._pod_list = pod_list
        self._names = names
        self._refresh_ns = round(refresh_seconds * NS_PER_SECOND)
        self._clock = clock
        self._labels: Mapping[str, Labels] = {}
        self._wanted: set[str] = set()
        self._not_listed: AbstractSet[str] = frozenset()

    def labels_of(self, pod_uid: str) -> Labels:
        """Return the labels of a pod's series; none where it is not known, and it is asked for."""
        known = self._labels.get(pod_uid)
        if known is not None:
            return known
        if pod_uid not in self._not_listed and len(self._wanted) < MAX_NAMES:
            self._wanted.add(pod_uid)
        return ()

    async def run(self, check: Check) -> None:
        """Query the kubelet now and then, and where a pod is new, until cancelled."""
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
            raise PodListError(f"the kubelet answers with {error}") from error
        # Of what it does not list it is asked once more with the next answer, not each second.
        self._not_listed = wanted - labels.keys()
        self._labels = labels
