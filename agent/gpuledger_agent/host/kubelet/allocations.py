"""Which devices the kubelet has allocated to which containers.

It is asked as ticks begin, now and then and when pods change.

A tick says who holds what as it is when the GPUs are asked. So the question is put at that time,
and the tick waits for the answer, though not for long: one that comes later is in the next tick.

Here is the seam to the kubelet (`Kubelet`) and the loop over it. Nothing here knows the wire form
or the forms of device ids; gRPC is imported by the first question.
"""

import asyncio
import errno
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Final, Protocol

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
    allocate,
    count_replicas,
    find_assignments,
)
from gpuledger_agent.host.kubelet.messages import (
    ALLOCATABLE_METHOD,
    METHOD,
    ContainerDevices,
    KubeletError,
    parse_allocatable,
    parse_answer,
)
from gpuledger_agent.metrics import (
    ALLOCATIONS,
    ALLOCATIONS_UNRESOLVED,
    KUBELET_ANSWERS,
    KUBELET_ERRORS,
)
from gpuledger_agent.settings import KubeletSettings

MAX_ANSWER_BYTES: Final = 4 * 1024 * 1024
"""Some ten times what the kubelet of a node with 250 pods answers, and gRPC's own default."""

_REASONS: Final[Mapping[int, str]] = {
    errno.ENOENT: "missing",
    errno.ECONNREFUSED: "refused",
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


class Kubelet(Protocol):
    """The kubelet's API of which container holds which device."""

    async def list_pods(self) -> bytes:
        """Return a `v1.ListPodResourcesResponse`; raises KubeletError."""

    async def list_allocatable(self) -> bytes:
        """Return a `v1.AllocatableResourcesResponse`; raises KubeletError."""


class SocketKubelet:
    """The kubelet behind its Unix socket."""

    def __init__(self, socket: Path, *, timeout_seconds: float) -> None:
        self._socket = socket
        self._timeout_seconds = timeout_seconds

    async def list_pods(self) -> bytes:
        """Return which container holds which device; raises KubeletError."""
        return await self._request(METHOD)

    async def list_allocatable(self) -> bytes:
        """Return which devices there are, held or not; raises KubeletError."""
        return await self._request(ALLOCATABLE_METHOD)

    async def _request(self, method: str) -> bytes:
        """Return the answer to one call, on a connection of its own.

        So a kubelet that restarts leaves no broken connection behind. Raises KubeletError.
        """
        try:
            self._socket.stat()
            # Many a node has no kubelet to ask, and there the library would only take memory.
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
"""Between two questions, however many reasons there are. Less than a tick of a second, so that
ticks which are not quite on time have one each."""
ALLOCATABLE_SECONDS: Final = 60.0
"""Between two questions for what there is to give: it changes with a plugin's settings."""

_log = structlog.get_logger(__name__)


FindEnded = Callable[[AbstractSet[tuple[str, str]]], AbstractSet[tuple[str, str]]]
"""Takes namespaces and names of pods, and gives those that are over."""
HavePodsChanged = Callable[[], bool]
"""Says whether pods have come to the node, or left it, since it was asked last."""


class Allocations:
    """The devices of the node's containers, by the kubelet's last answer."""

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        clock: Clock,
        check: Check,
        backoff: Backoff,
        settings: KubeletSettings,
        find_ended: FindEnded = lambda _: frozenset(),
        have_pods_changed: HavePodsChanged = lambda: False,
    ) -> None:
        """Take the parts; `find_ended` says which pods are over that the kubelet lists on."""
        self._find_ended = find_ended
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
        self._assignments: Sequence[DeviceAssignment] = ()
        self._resolved: list[DeviceAllocation] = []
        self._pods: AbstractSet[tuple[str, str]] = frozenset()
        self._resolved_of: (
            tuple[Sequence[DeviceAssignment], Sequence[ContainerDevices], DeviceIndex] | None
        ) = None
        self._is_logged = False
        self._allocatable: Sequence[ContainerDevices] = ()
        self._allocatable_ns: int | None = None

    def refresh_soon(self) -> None:
        """Have the kubelet asked in the next tick: something on the node has changed."""
        self._is_wanted = True

    def request_if_due(self) -> None:
        """Put the question where it is time to, or where something has changed; for each tick.

        Not while another is on its way, nor before a kubelet that failed may be asked again.
        """
        self._is_awaited = False
        # Asked in any case: what it saw now is no change the next time.
        self._is_wanted = self._have_pods_changed() or self._is_wanted
        now_ns = self._clock.monotonic_ns()
        if not self._done.is_set() or now_ns < self._not_before_ns:
            return
        seconds = MIN_SECONDS if self._is_wanted else self._settings.refresh_seconds - MIN_SECONDS
        if self._requested_ns is not None and now_ns - self._requested_ns < seconds * NS_PER_SECOND:
            return
        # Before the question: what changes while it is asked may not be in the answer.
        self._is_wanted = False
        self._is_awaited = True
        self._requested_ns = now_ns
        self._done.clear()
        self._requested.set()

    async def wait_answer(self, seconds: float) -> None:
        """Wait for the answer to this tick's query, if there is one, for so long."""
        if self._is_awaited:
            await wait_event(self._done, seconds)

    def current(self, devices: DeviceIndex) -> list[DeviceAllocation]:
        """Return what is allocated, as far as it leads to a GPU; the list is not to be changed.

        What a pod held that is over is left out, though the kubelet may list it for long.

        Empty where there is no answer, or where the last one is too old.
        """
        assignments = self._assignments if self._is_fresh() else ()
        before, there = self._resolved_of, self._allocatable
        # Resolved anew only where an answer or the devices changed: it is asked for each tick.
        if (
            before is None
            or before[0] is not assignments
            or before[1] is not there
            or before[2] != devices
        ):
            self._resolved_of = (assignments, there, devices)
            replicas = count_replicas(there, devices) if assignments else ReplicaCounts()
            self._resolved, unresolved = allocate(
                assignments,
                devices,
                replicas,
                admin_access_namespaces=self._settings.admin_access_namespaces,
            )
            ALLOCATIONS.set(len(self._resolved))
            for reason in Unresolved:
                ALLOCATIONS_UNRESOLVED.labels(reason=reason.value).set(unresolved[reason])
            self._pods = {(allocation.namespace, allocation.pod) for allocation in self._resolved}
        ended = self._find_ended(self._pods)
        if not ended:
            return self._resolved
        return [
            allocation
            for allocation in self._resolved
            if (allocation.namespace, allocation.pod) not in ended
        ]

    async def run(self) -> None:
        """Query the kubelet when ticks ask for it, one query at a time, until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            try:
                self._ingest(await self._kubelet.list_pods())
                await self._refresh_allocatable()
            except KubeletError as error:
                KUBELET_ERRORS.labels(reason=error.reason).inc()
                self._evaluate_failure(f"the kubelet at {self._settings.socket}: {error}")
                # Not a `RetryingCaller`: it is a tick that asks again, and what a failure means
                # depends on how long ago the last success was.
                self._is_wanted = True
                wait_ns = round(self._backoff.next_seconds() * NS_PER_SECOND)
                self._not_before_ns = self._clock.monotonic_ns() + wait_ns
            else:
                self._backoff.reset()
            finally:
                self._done.set()

    async def _refresh_allocatable(self) -> None:
        """Query the allocatable devices, once a minute at most; what was answered last stands."""
        now_ns, requested_ns = self._clock.monotonic_ns(), self._allocatable_ns
        if requested_ns is not None and now_ns - requested_ns < ALLOCATABLE_SECONDS * NS_PER_SECOND:
            return
        self._allocatable_ns = now_ns
        try:
            there = parse_allocatable(await self._kubelet.list_allocatable())
        except (KubeletError, ValueError) as error:
            # Before 1.28 a kubelet may not know it: then nobody says how many replicas there are.
            reason = error.reason if isinstance(error, KubeletError) else "malformed"
            if reason != "unimplemented":
                KUBELET_ERRORS.labels(reason=reason).inc()
            return
        if there != self._allocatable:
            self._allocatable = there

    def _ingest(self, answer: bytes) -> None:
        # Most answers are as the one before, byte for byte, and need not be read.
        if self._answered_ns is None or answer != self._answer:
            try:
                pods = parse_answer(answer)
            except ValueError as error:
                raise KubeletError("malformed", f"no list of pods: {error}") from error
            self._assignments = find_assignments(pods, self._settings.resource_names)
            self._answer = answer
        self._answered_ns = self._clock.monotonic_ns()
        KUBELET_ANSWERS.inc()
        self._check.ok(f"{len(self._assignments)} devices are with containers")

    def _evaluate_failure(self, detail: str) -> None:
        """Set the check: a failure is none while the last answer counts."""
        if self._is_fresh():
            self._check.ok(f"{detail}; the last answer still counts")
        elif self._answered_ns is None and self._settings.enabled == "auto":
            # Nobody promised that there is a kubelet: it is said once.
            if not self._is_logged:
                self._is_logged = True
                _log.info("kubelet_not_found", detail=detail)
            self._check.ok(f"{detail}; ticks have no allocations")
        else:
            self._check.failed(f"{detail}; ticks have no allocations")

    def _is_fresh(self) -> bool:
        if self._answered_ns is None:
            return False
        age_ns = self._clock.monotonic_ns() - self._answered_ns
        return age_ns <= self._settings.cache_ttl_seconds * NS_PER_SECOND
