"""What the kubelet has given to whom, kept fresh: asked again and again, and at once on demand.

Nothing here knows gRPC or the forms of device ids.
"""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from agent.host.kubelet.assignments import (
    DeviceAssignment,
    DeviceIndex,
    Unresolved,
    allocate,
    find_assignments,
)
from agent.host.kubelet.client import Kubelet, KubeletError
from agent.host.kubelet.messages import parse_answer
from agent.metrics import ALLOCATIONS, ALLOCATIONS_UNRESOLVED, KUBELET_ANSWERS, KUBELET_ERRORS
from agent.settings import KubeletSettings
from gpuledger.clock import Clock
from gpuledger.records import DeviceAllocation
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import run_tasks

MIN_SECONDS: Final = 1.0
"""Between two questions, however many reasons there are to ask."""
_NS: Final = 1_000_000_000

_log = structlog.get_logger(__name__)


class Allocations:
    """The devices of the node's containers, as the kubelet last said."""

    def __init__(
        self,
        *,
        kubelet: Kubelet,
        clock: Clock,
        check: Check,
        backoff: Backoff,
        settings: KubeletSettings,
    ) -> None:
        self._kubelet = kubelet
        self._clock = clock
        self._check = check
        self._backoff = backoff
        self._settings = settings
        self._wanted = asyncio.Event()
        self._answer = b""
        self._answered_ns: int | None = None
        self._assignments: Sequence[DeviceAssignment] = ()
        self._resolved: list[DeviceAllocation] = []
        self._resolved_of: tuple[Sequence[DeviceAssignment], DeviceIndex] | None = None
        self._is_logged = False

    def refresh_soon(self) -> None:
        """Have the kubelet asked within a second: something on the node has changed."""
        self._wanted.set()

    def current(self, devices: DeviceIndex) -> list[DeviceAllocation]:
        """Return what is allocated, as far as it leads to a GPU; the list is not to be changed.

        Empty where there is no answer, or where the last one is too old.
        """
        assignments = self._assignments if self._is_fresh() else ()
        before = self._resolved_of
        # Resolved anew only where the answer or the devices changed: it is asked for each tick.
        if before is None or before[0] is not assignments or before[1] != devices:
            self._resolved_of = (assignments, devices)
            self._resolved, unresolved = allocate(assignments, devices)
            ALLOCATIONS.set(len(self._resolved))
            for reason in Unresolved:
                ALLOCATIONS_UNRESOLVED.labels(reason=reason.value).set(unresolved[reason])
        return self._resolved

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._wanted.clear()
            try:
                self._ingest(await self._kubelet.list_pods())
            except KubeletError as error:
                KUBELET_ERRORS.labels(reason=error.reason).inc()
                self._evaluate_failure(f"the kubelet at {self._settings.socket}: {error}")
                # Not a `RetryingCaller`: a success is followed by a wait as well, and what a
                # failure means depends on how long ago the last success was.
                await self._clock.sleep(max(MIN_SECONDS, self._backoff.next_seconds()))
            else:
                self._backoff.reset()
                await self._clock.sleep(MIN_SECONDS)
                await self._wait(self._settings.refresh_seconds - MIN_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Wait until it is time, or until somebody wants to know."""
        if seconds <= 0 or self._wanted.is_set():
            return
        async with run_tasks(self._clock.sleep(seconds), self._wanted.wait()) as waits:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def _ingest(self, answer: bytes) -> None:
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
        return age_ns <= self._settings.cache_ttl_seconds * _NS
