"""Queries which devices the kubelet has allocated to which containers.

The kubelet is queried periodically and when pods change, always at the start of a tick. A tick
should have the allocations of the time at which the GPUs are queried. The query therefore starts at
that time, and the tick waits briefly for the response. If the response is late, the next tick uses
it.

This module has the interface to the kubelet (`Kubelet`) and the loop that queries the kubelet.
`messages` parses the wire format, and `assignments` parses device ids. The first query imports
gRPC.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.records import DeviceAllocation
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import wait_event
from gpuledger_agent.host.kubelet.assignments import (
    DeviceAssignment,
    DeviceIndex,
    ReplicaCounts,
    Unresolved,
    count_replicas,
    find_assignments,
    find_unmatched,
)
from gpuledger_agent.host.kubelet.messages import (
    ALLOCATABLE_METHOD,
    METHOD,
    ContainerDevices,
    KubeletError,
    parse_allocatable,
    parse_answer,
)
from gpuledger_agent.host.kubelet.shares.find import StatedPods
from gpuledger_agent.host.kubelet.shares.merge import Merged, merge_allocations
from gpuledger_agent.host.kubelet.shares.pod_shares import PodShares
from gpuledger_agent.host.node_pods import PodEnds, PodName
from gpuledger_agent.metrics import (
    ALLOCATIONS,
    ALLOCATIONS_UNRESOLVED,
    KUBELET_ANSWERS,
    KUBELET_ERRORS,
)
from gpuledger_agent.settings import KubeletSettings

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Maximum size of a response: more than twice that of a node with eight GPUs in 16,384 time-sliced
replicas each."""

_REASONS: Final[Mapping[int, str]] = {
    errno.ENOENT: "missing",
    errno.ECONNREFUSED: "refused",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class Kubelet(Protocol):
    """The kubelet's pod-resources API."""

    async def list_pods(self) -> bytes:
        """Return a `v1.ListPodResourcesResponse`; raises KubeletError."""

    async def list_allocatable(self) -> bytes:
        """Return a `v1.AllocatableResourcesResponse`; raises KubeletError."""


class SocketKubelet:
    """The kubelet's pod-resources API at its Unix socket."""

    def __init__(self, socket: Path, *, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds

    async def list_pods(self) -> bytes:
        """Return a `v1.ListPodResourcesResponse` with the devices of all containers.

        Raises `KubeletError`.
        """
        return await self._request(METHOD)

    async def list_allocatable(self) -> bytes:
        """Return a `v1.AllocatableResourcesResponse` with all devices, allocated or not.

        Raises `KubeletError`.
        """
        return await self._request(ALLOCATABLE_METHOD)

    async def _request(self, method: str) -> bytes:
        """Call a gRPC method and return the response; raises `KubeletError`.

        Each call opens a new connection, because a restart of the kubelet breaks open connections.
        """
        try:
            self._socket.stat()
            # Imported late to save memory on nodes without a kubelet.
            from gpuledger_agent.host.kubelet.grpc import call_kubelet  # noqa: PLC0415  # see above

            async with asyncio.timeout(self._timeout_seconds):
                return await call_kubelet(
                    self._socket,
                    method,
                    timeout_seconds=self._timeout_seconds,
                    max_bytes=MAX_ANSWER_BYTES,
                )
        except TimeoutError as error:
            detail = f"no answer within {self._timeout_seconds:g} s"
            raise KubeletError("deadline", detail) from error
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, "broken")
            raise KubeletError(reason, str(error)) from error


MIN_SECONDS: Final = 0.5
"""Minimum time between two queries. It is shorter than a sampling interval of 1 s, so that each
tick can start a query even if the tick is slightly early."""
ALLOCATABLE_SECONDS: Final = 60.0
"""Time between two queries of allocatable devices, which change only if a device plugin's settings
change."""

_log = structlog.get_logger(__name__)


_PodDevices = Mapping[PodName, Sequence[DeviceAssignment]]
"""The devices of each pod."""
HavePodsChanged = Callable[[], bool]
"""Returns whether pods were created or deleted on the node since the last call."""


class _Facts(NamedTuple):
    """The facts from which allocations are merged."""

    assignments: Sequence[DeviceAssignment]
    allocatable: Sequence[ContainerDevices]
    stated: StatedPods | None
    devices: DeviceIndex


class Allocations:
    """Queries the devices allocated to the node's containers, and returns the last response."""

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        clock: Clock,
        check: Check,
        backoff: Backoff,
        settings: KubeletSettings,
        ends: PodEnds | None = None,
        have_pods_changed: HavePodsChanged = lambda: False,
        shares: PodShares | None = None,
    ) -> None:
        """Start without allocations.

        `ends` finds ended pods that the kubelet still lists, and running pods that it does not
        list; without it, the list counts.
        `have_pods_changed` is called in each tick; if it returns true, the kubelet is queried.
        `shares` has the shares that annotations of pods state; without it, no pod reserves GPUs.
        """
        self._shares = shares
        self._ends = ends
        self._have_pods_changed = have_pods_changed
        self._kubelet = kubelet
        self._clock = clock
        self._check = check
        self._backoff = backoff
        self._settings = settings
        self._is_wanted = True
        self._is_awaited = False
        self._requested_ns: int | None = None
        self._not_before_ns = 0
        self._requested = asyncio.Event()
        self._done = asyncio.Event()
        self._done.set()
        self._answer = b""
        self._answered_ns: int | None = None
        self._is_found = False
        """Whether the node has a kubelet: a query did not fail only because of a missing socket."""
        self._is_absent = False
        """Whether the node counts as a node without a kubelet: `kubelet.enabled` is `auto`, and no
        query has found the socket."""
        self._listed: _PodDevices = {}
        """The pods in the last response, then those that are missing from it (`_find_missing`)."""
        self._has_missing = False
        self._assignments: Sequence[DeviceAssignment] = ()
        """The devices of all pods in `_listed`."""
        self._merged = Merged()
        self._unmatched: Sequence[DeviceAssignment] = ()
        """Devices of containers that match no GPU of the node."""
        self._has_failed = False
        """Whether the last query failed."""
        self._pods: AbstractSet[PodName] = frozenset()
        self._merged_from: _Facts | None = None
        self._is_logged = False
        self._allocatable: Sequence[ContainerDevices] = ()
        self._allocatable_ns: int | None = None

    def refresh_soon(self) -> None:
        """Query the kubelet in the next tick, because something on the node has changed."""
        self._is_wanted = True

    def request_if_due(self) -> None:
        """Start a query if it is time for the next one or pods have changed; call it in each tick.

        No query is started while another one is in progress, or during the backoff after a failure.
        """
        self._is_awaited = False
        # Call the function in each tick, so that the next tick does not see the same change again.
        if self._have_pods_changed():
            self._is_wanted = True
            if self._shares:
                self._shares.request_soon()
        now_ns = self._clock.monotonic_ns()
        if not self._done.is_set() or now_ns < self._not_before_ns:
            return
        seconds = MIN_SECONDS if self._is_wanted else self._settings.refresh_seconds - MIN_SECONDS
        if self._requested_ns is not None and now_ns - self._requested_ns < seconds * NS_PER_SECOND:
            return
        # Reset the flag before the query: the response may lack changes made during the query.
        self._is_wanted = False
        self._is_awaited = True
        self._requested_ns = now_ns
        if self._ends:
            self._ends.begin_query()
        self._done.clear()
        self._requested.set()

    async def wait_answer(self, seconds: float) -> None:
        """Wait at most `seconds` for the response, if this tick has started a query."""
        if self._is_awaited:
            await wait_event(self._done, seconds)

    @property
    def are_unknown(self) -> bool:
        """Whether the last list from `current` may be incomplete.

        The list may be incomplete if the kubelet has not responded or its last response is too old.
        The same applies if no response has listed all running pods yet, or if the shares of some
        pods may be only in annotations that were not read. On a node without a kubelet
        (`kubelet.enabled` is `auto`, and the socket never existed), the list is complete.
        """
        if not self._is_fresh():
            return not self._is_absent
        if self._ends and not self._ends.is_complete:
            return True
        return self._shares is not None and self._shares.are_unknown(self._merged)

    def current(self, devices: DeviceIndex) -> list[DeviceAllocation]:
        """Return the allocations in the last response whose GPU is in `devices`.

        Allocations of ended pods, which the kubelet may still list for a long time, are left out.
        The list is empty if there is no response or the last response is too old. Callers must not
        change the list.
        """
        self._merge_if_changed(devices)
        if self._shares:
            self._shares.report(self._merged)
        ended = self._ends.find_ended(self._pods) if self._ends else ()
        if not ended:
            return self._merged.allocations
        return [
            allocation
            for allocation in self._merged.allocations
            if (allocation.namespace, allocation.pod) not in ended
        ]

    def _merge_if_changed(self, devices: DeviceIndex) -> None:
        """Merge what the kubelet and annotations state, unless nothing has changed.

        Called in each tick; resolving ids each time would be slow.
        """
        is_fresh, shares = self._is_fresh(), self._shares
        assignments = self._assignments if is_fresh else ()
        # Without the kubelet's response, it is unknown which pods have GPUs.
        stated = shares.stated if shares and is_fresh else None
        before, there = self._merged_from, self._allocatable
        if (
            before is not None
            and before.assignments is assignments
            and before.allocatable is there
            and before.stated is stated
            and before.devices == devices
        ):
            return
        self._merged_from = _Facts(assignments, there, stated, devices)
        replicas = count_replicas(there, devices) if assignments else ReplicaCounts()
        self._merged = merge_allocations(
            assignments,
            stated,
            devices,
            replicas,
            placeholder_namespaces=shares.placeholder_namespaces if shares else (),
            admin_access_namespaces=self._settings.admin_access_namespaces,
        )
        self._unmatched = find_unmatched(assignments, devices)
        if is_fresh and not self._has_failed:
            self._report_answer()
        ALLOCATIONS.set(sum(one.count or 1 for one in self._merged.allocations))
        unresolved = self._merged.unresolved
        for reason in Unresolved:
            ALLOCATIONS_UNRESOLVED.labels(reason=reason.value).set(unresolved[reason])
        self._pods = {(one.namespace, one.pod) for one in self._merged.allocations}

    async def run(self) -> None:
        """Make the queries that ticks have requested, one at a time, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                self._ingest(await self._kubelet.list_pods())
                await self._refresh_allocatable()
            except KubeletError as error:
                KUBELET_ERRORS.labels(reason=error.reason).inc()
                self._is_found = self._is_found or error.reason != "missing"
                self._is_absent = self._settings.enabled == "auto" and not self._is_found
                self._report_failure(f"the kubelet at {self._settings.socket}: {error}")
                # Not a `RetryingCaller`, because a tick starts the retry, and a failure only fails
                # the check if the last success was too long ago.
                self._is_wanted = True
                wait_ns = round(self._backoff.next_seconds() * NS_PER_SECOND)
                self._not_before_ns = self._clock.monotonic_ns() + wait_ns
            else:
                self._backoff.reset()
            finally:
                self._done.set()

    async def _refresh_allocatable(self) -> None:
        """Query the allocatable devices, at most once a minute; on failure, keep the last list."""
        now_ns, requested_ns = self._clock.monotonic_ns(), self._allocatable_ns
        if requested_ns is not None and now_ns - requested_ns < ALLOCATABLE_SECONDS * NS_PER_SECOND:
            return
        self._allocatable_ns = now_ns
        try:
            there = parse_allocatable(await self._kubelet.list_allocatable())
        except (KubeletError, ValueError) as error:
            # Kubelets before 1.28 may not support the call; the number of replicas is then unknown.
            reason = error.reason if isinstance(error, KubeletError) else "malformed"
            if reason != "unimplemented":
                KUBELET_ERRORS.labels(reason=reason).inc()
            return
        # Without devices, the plugins have not registered yet, as after a restart of the kubelet.
        if there and there != self._allocatable:
            self._allocatable = there

    def _ingest(self, answer: bytes) -> None:
        """Use a response: update the pods with devices, and the check."""
        # Most responses equal the previous one, byte for byte, and need not be parsed.
        if self._answered_ns is None or answer != self._answer or self._has_missing:
            try:
                pods = parse_answer(answer)
            except ValueError as error:
                raise KubeletError("malformed", f"not a pod list: {error}") from error
            found: dict[PodName, list[DeviceAssignment]] = {
                (pod.namespace, pod.name): [] for pod in pods
            }
            for one in find_assignments(pods, self._settings.resource_names):
                found[one.namespace, one.pod].append(one)
            missing = self._find_missing(found)
            self._has_missing = bool(missing)
            self._listed = {**found, **missing}
            self._assignments = [one for devices in self._listed.values() for one in devices]
            self._answer = answer
        if self._ends:
            self._ends.learn(self._listed.keys())
            self._is_wanted |= not self._ends.is_complete
        self._answered_ns = self._clock.monotonic_ns()
        self._is_found = True
        KUBELET_ANSWERS.inc()
        self._has_failed = False
        self._report_answer()

    def _report_answer(self) -> None:
        """Set the check after a response, and name a device that matches no GPU of the node."""
        count = sum(assignment.is_gpu_resource for assignment in self._assignments)
        if count and self._ends and not self._ends.shows_cgroups:
            self._check.failed(
                f"{self._settings.cgroup_root} shows no cgroups of pods, so devices count as"
                " allocated until the kubelet no longer lists them, even if their pods have ended;"
                " mount the node's /sys/fs/cgroup read-only and set kubelet.cgroup_root to it"
            )
        else:
            detail = f"{count} devices are allocated to containers"
            if self._unmatched:
                one = self._unmatched[0]
                detail += (
                    f"; matching no GPU of the node: {len(self._unmatched)}, such as"
                    f" {one.resource_name} {one.device_id} of pod {one.namespace}/{one.pod}"
                )
            self._check.ok(detail)

    def _find_missing(self, found: _PodDevices) -> _PodDevices:
        """Return running pods that the response before had and this one does not, with devices.

        A kubelet that starts responds before it has read its pods from the API server: it then
        lists no pods, or only static ones. Devices that another pod has now are left out.
        """
        if not self._ends:
            return {}
        taken = {
            (one.resource_name, one.device_id) for devices in found.values() for one in devices
        }
        missing = {
            name: [one for one in devices if (one.resource_name, one.device_id) not in taken]
            for name, devices in self._listed.items()
            if name not in found and self._ends.is_running(name)
        }
        return {name: devices for name, devices in missing.items() if devices}

    def _report_failure(self, detail: str) -> None:
        """Set the check after a failed query, and log the first one if the node has no kubelet.

        If there was no response yet, the check fails unless `kubelet.enabled` is `auto`. Otherwise
        the check fails if the last response is too old.
        """
        self._has_failed = True
        if self._is_fresh():
            self._check.ok(f"{detail}; the last response is still used")
        elif self._answered_ns is None and self._settings.enabled == "auto":
            # With `auto`, the node may have no kubelet, so log the failure only once.
            if not self._is_logged:
                self._is_logged = True
                _log.info("kubelet_not_found", detail=detail)
            self._check.ok(f"{detail}; samples have no allocations")
        else:
            self._check.failed(f"{detail}; samples have no allocations")

    def _is_fresh(self) -> bool:
        if self._answered_ns is None:
            return False
        age_ns = self._clock.monotonic_ns() - self._answered_ns
        return age_ns <= self._settings.cache_ttl_seconds * NS_PER_SECOND
