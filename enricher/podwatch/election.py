"""Which podwatch publishes: the one that holds the Lease, as Kubernetes' own components elect.

Clocks of different machines are never compared: whoever waits measures by its own clock for how
long the Lease has not changed. A holder counts from the moment at which it began its last
successful renewal, and gives up well before anybody else may take the Lease.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from http import HTTPStatus
from math import ceil
from typing import Any, Final

import structlog

from enricher.podwatch import metrics
from enricher.podwatch.api import KubernetesError
from enricher.podwatch.lease import Lease, LeaseClient, LeaseSpec
from enricher.podwatch.settings import RETRY_MAX_FACTOR, LeaseSettings
from gpuledger.clock import Clock
from gpuledger.errors import UnavailableError
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.tasks import run_tasks

_NS: Final = 1_000_000_000
_RELEASE_SECONDS: Final = 2.0
_RELEASED_FOR_SECONDS: Final = 1
_NO_PERMISSION: Final = ": grant its account get and update on this Lease and create on leases"
_log = structlog.get_logger(__name__)


class LeaseLostError(UnavailableError):
    """The Lease is not held any more, or may not be."""


class Elector:
    """One candidate for a Lease."""

    def __init__(
        self,
        *,
        keeper: LeaseClient,
        settings: LeaseSettings,
        identity: str,
        check: Check,
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._keeper = keeper
        self._settings = settings
        self._identity = identity
        self._check = check
        self._clock = clock
        self._chance = chance
        self._seen: Lease | None = None
        self._seen_at_ns = 0
        self._held_until_ns: int | None = None

    def must_hold(self) -> None:
        """Raise `LeaseLostError` where another one may hold the Lease."""
        if not self._holds():
            raise LeaseLostError(f"{self._identity} does not hold the Lease any more")

    async def acquire(self) -> None:
        """Wait until the Lease is held."""
        while not await self._attempt():
            await self._clock.sleep(self._pause_seconds())
        metrics.LEADING.set(1)
        _log.info("lease_acquired", identity=self._identity)

    async def lead(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work for as long as the Lease is held, then or when cancelled release it.

        Raises what the work raises.
        """
        try:
            async with run_tasks(work, self._keep()) as (working, keeping):
                await asyncio.wait({working, keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The work has ended before the Lease is another one's.
            metrics.LEADING.set(0)
            await self._release()
        for task in (working, keeping):
            _raise_failure_of(task)

    async def _keep(self) -> None:
        """Renew until the Lease is lost."""
        while self._holds():
            await self._clock.sleep(min(self._settings.retry_seconds, self._left_seconds()))
            if self._holds():
                await self._attempt()
        self._check.failed("the lease was lost")
        _log.info("lease_lost", identity=self._identity)

    async def _attempt(self) -> bool:
        """Try once to acquire or renew; a failure is told and not raised."""
        try:
            await self._acquire_or_renew()
        except KubernetesError as error:
            metrics.LEASE_FAILURES.inc()
            self._check.failed(f"{error.said}{self._remedy(error.status)}")
        else:
            self._check.ok("leading" if self._holds() else self._standing_by())
        return self._holds()

    def _remedy(self, status: int | None) -> str:
        # In a namespace that is not its own an account has no right, whether there is one or not.
        named = f"lease.namespace is {self._settings.namespace!r}" * bool(self._settings.namespace)
        if status == HTTPStatus.FORBIDDEN:
            return _NO_PERMISSION + (named and f"; {named}: is that the right one?")
        if status == HTTPStatus.NOT_FOUND and named:
            return f": {named}: is that the right one?"
        return ""

    async def _acquire_or_renew(self) -> None:
        began_ns = self._clock.boottime_ns()
        within_seconds = self._settings.renew_deadline_seconds / 2
        lease = await self._keeper.read(within_seconds=within_seconds)
        self._observe(lease)
        if lease is not None and not self._may_take(lease):
            self._held_until_ns = None
            return
        spec = self._claim(lease)
        written = await self._keeper.write(spec, after=lease, within_seconds=within_seconds)
        if written is not None:
            self._observe(written)
            deadline_ns = round(self._settings.renew_deadline_seconds * _NS)
            self._held_until_ns = began_ns + deadline_ns

    def _observe(self, lease: Lease | None) -> None:
        """Take what was read; a change of the spec is a sign of life from whoever holds it."""
        if self._seen is None or lease is None or lease.spec != self._seen.spec:
            self._seen_at_ns = self._clock.boottime_ns()
        self._seen = lease

    def _may_take(self, lease: Lease) -> bool:
        holder = lease.spec.holder_identity
        return not holder or holder == self._identity or self._free_in_seconds(lease) <= 0

    def _free_in_seconds(self, lease: Lease) -> float:
        duration = lease.spec.lease_duration_seconds or self._settings.duration_seconds
        return duration - (self._clock.boottime_ns() - self._seen_at_ns) / _NS

    def _claim(self, before: Lease | None) -> LeaseSpec:
        """Return the Lease as one of ours; the time it was acquired stays while it is renewed."""
        old = before.spec if before else LeaseSpec()
        now = _timestamp(self._clock)
        is_renewal = old.holder_identity == self._identity
        transitions = old.lease_transitions or 0
        return LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=ceil(self._settings.duration_seconds),
            acquire_time=(old.acquire_time or now) if is_renewal else now,
            renew_time=now,
            lease_transitions=transitions + (before is not None and not is_renewal),
        )

    async def _release(self) -> None:
        """Let others have the Lease at once; where that fails they wait until it runs out."""
        lease, self._seen = self._seen, None
        self._held_until_ns = None
        if lease is None or lease.spec.holder_identity != self._identity:
            return
        spec = LeaseSpec(
            holder_identity="",
            lease_duration_seconds=_RELEASED_FOR_SECONDS,
            acquire_time=_timestamp(self._clock),
            renew_time=_timestamp(self._clock),
            lease_transitions=lease.spec.lease_transitions,
        )
        try:
            await self._keeper.write(spec, after=lease, within_seconds=_RELEASE_SECONDS)
        except KubernetesError as error:
            _log.warning("lease_release_failed", error=error.said)
        else:
            _log.info("lease_released", identity=self._identity)

    def _holds(self) -> bool:
        return self._left_seconds() > 0

    def _left_seconds(self) -> float:
        if self._held_until_ns is None:
            return 0.0
        return (self._held_until_ns - self._clock.boottime_ns()) / _NS

    def _pause_seconds(self) -> float:
        """Return the pause before the next attempt: random, and no longer than the Lease lasts."""
        spread = RETRY_MAX_FACTOR - 1
        pause = self._settings.retry_seconds * (1 - spread + 2 * spread * self._chance())
        left = self._free_in_seconds(self._seen) if self._seen else 0.0
        return left if 0 < left < pause else pause

    def _standing_by(self) -> str:
        holder = self._seen.spec.holder_identity if self._seen else None
        return f"standing by: {holder or 'somebody else'} leads"


def _timestamp(clock: Clock) -> str:
    """Return the time as Kubernetes' MicroTime."""
    now = datetime.fromtimestamp(clock.time_ns() / _NS, tz=UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _raise_failure_of(task: asyncio.Task[None]) -> None:
    """Raise what a task failed with, except that the Lease was lost."""
    error = None if task.cancelled() else task.exception()
    if isinstance(error, BaseExceptionGroup):
        error = error.split(LeaseLostError)[1]
    if error is not None and not isinstance(error, LeaseLostError):
        raise error
