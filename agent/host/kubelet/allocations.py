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
    find_holdings,
)
from agent.host.kubelet.client import Kubelet, KubeletError
from agent.host.kubelet.messages import parse_answer
from agent.metrics import ALLOCATIONS, ALLOCATIONS_UNRESOLVED, KUBELET_ANSWERS, KUBELET_ERRORS
from agent.settings import KubeletSettings
from gpuledger.clock import Clock
from gpuledger.records import DeviceAllocation
from gpuledger.runtime import Backoff, Check
from gpuledger.runtime.tasks import end_tasks

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
        self._holdings: Sequence[DeviceAssignment] = ()
        self._resolved: list[DeviceAllocation] = []
        self._resolved_of: tuple[Sequence[DeviceAssignment], DeviceIndex] | None = None
        self._is_told = False

    def refresh_soon(self) -> None:
        """Have the kubelet asked within a second: something on the node has changed."""
        self._wanted.set()

    def current(self, devices: DeviceIndex) -> list[DeviceAllocation]:
        """Return what is allocated, as far as it leads to a GPU; the list is not to be changed.

        Empty where there is no answer, or where the last one is too old.
        """
        holdings = self._holdings if self._is_fresh() else ()
        before = self._resolved_of
        if before is None or before[0] is not holdings or before[1] != devices:
            self._resolved_of = (holdings, devices)
            self._resolve(holdings, devices)
        return self._resolved

    async def run(self) -> None:
        """Ask until cancelled."""
        while True:
            self._wanted.clear()
            try:
                self._take(await self._kubelet.list_pods())
            except KubeletError as error:
                self._fail(error)
                await self._clock.sleep(max(MIN_SECONDS, self._backoff.next_seconds()))
            else:
                self._backoff.reset()
                await self._clock.sleep(MIN_SECONDS)
                await self._wait(self._settings.refresh_seconds - MIN_SECONDS)

    async def _wait(self, seconds: float) -> None:
        """Wait until it is time, or until somebody wants to know."""
        if seconds <= 0 or self._wanted.is_set():
            return
        waits = [
            asyncio.ensure_future(self._clock.sleep(seconds)),
            asyncio.ensure_future(self._wanted.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*waits)

    def _take(self, answer: bytes) -> None:
        if self._answered_ns is None or answer != self._answer:
            try:
                pods = parse_answer(answer)
            except ValueError as error:
                raise KubeletError("malformed", f"no list of pods: {error}") from error
            self._holdings = find_holdings(pods, self._settings.resource_names)
            self._answer = answer
        self._answered_ns = self._clock.monotonic_ns()
        KUBELET_ANSWERS.inc()
        self._check.ok(f"{len(self._holdings)} devices are with containers")

    def _fail(self, error: KubeletError) -> None:
        KUBELET_ERRORS.labels(reason=error.reason).inc()
        self._judge(f"the kubelet at {self._settings.socket}: {error}")

    def _judge(self, detail: str) -> None:
        """Return how bad a failure is: not at all where nobody promised that there is a kubelet."""
        if self._is_fresh():
            self._check.ok(f"{detail}; the last answer still counts")
        elif self._answered_ns is None and self._settings.enabled == "auto":
            self._expect_none(detail)
        else:
            self._check.failed(f"{detail}; ticks have no allocations")

    def _expect_none(self, detail: str) -> None:
        if not self._is_told:
            self._is_told = True
            _log.info("kubelet_not_found", detail=detail)
        self._check.ok(f"{detail}; ticks have no allocations")

    def _is_fresh(self) -> bool:
        if self._answered_ns is None:
            return False
        age_ns = self._clock.monotonic_ns() - self._answered_ns
        return age_ns <= self._settings.cache_ttl_seconds * _NS

    def _resolve(self, holdings: Sequence[DeviceAssignment], devices: DeviceIndex) -> None:
        self._resolved, unresolved = allocate(holdings, devices)
        ALLOCATIONS.set(len(self._resolved))
        for reason in Unresolved:
            ALLOCATIONS_UNRESOLVED.labels(reason=reason.value).set(unresolved[reason])
