"""Elects the podwatch that publishes: the holder of a Lease, as in Kubernetes' own components.

A Lease is an ordinary object; candidates agree on its meaning by convention. The election is safe
because a write contains the `resourceVersion` that was read: if two candidates write the Lease at
once, the server rejects one with 409.

Clocks of different machines are never compared: a candidate measures by its own clock how long the
Lease has not changed, and the times in the Lease are for people. A holder measures from the time
when it began its last successful renewal. It gives up the Lease (after `renew_deadline_seconds`)
well before another candidate may take the Lease (after `duration_seconds`). The clock also runs
while the machine sleeps.
"""

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from math import ceil
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec
import structlog

from gpuledger.clock import NS_PER_SECOND, Clock
from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime.readiness import Check
from gpuledger.runtime.tasks import run_tasks
from gpuledger_enricher.podwatch import pod_metrics
from gpuledger_enricher.podwatch.api import Answer, Api, KubernetesError
from gpuledger_enricher.podwatch.decode import decode_cut
from gpuledger_enricher.podwatch.pod_settings import RETRY_MAX_FACTOR, LeaseSettings

OWN_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RELEASE_SECONDS: Final = 2.0
"""Maximum time for which the shutdown of podwatch waits for the release of the Lease."""
_RELEASED_FOR_SECONDS: Final = 1
_MAX_LEASE_BYTES: Final = 32 * 2**20  # the limit for any object: etcd refuses far less
_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_NO_PERMISSION: Final = ": grant its account get and update on this Lease and create on leases"
_log = structlog.get_logger(__name__)


class LeaseSpec(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """The spec of a Lease, with the server's names."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Document(msgspec.Struct):
    """A Lease object as read, so that the fields of other writers are written back unchanged."""

    metadata: dict[str, Any]
    spec: LeaseSpec = LeaseSpec()


_decode_document: Final = msgspec.json.Decoder(_Document).decode


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A Lease in the API server."""

    metadata: Mapping[str, Any]
    """Includes the version that a write must contain to be accepted."""
    spec: LeaseSpec


class LeaseClient:
    """Reads and writes one Lease; raises `KubernetesError` if a request fails or is rejected."""

    def __init__(self, *, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._name = name
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self, *, within_seconds: float) -> Lease | None:
        """Return the Lease; `None` if it does not exist."""
        path = f"{self._folder}/{self._name}"
        request = self._api.get(
            path, query={}, idle_timeout_seconds=within_seconds, total_seconds=within_seconds
        )
        return await _lease_unless(HTTPStatus.NOT_FOUND, request)

    async def write(
        self, spec: LeaseSpec, *, after: Lease | None, within_seconds: float
    ) -> Lease | None:
        """Write the Lease if it has not changed since it was read; otherwise return `None`."""
        metadata = dict(after.metadata) if after else {"name": self._name}
        body = {**_KIND, "metadata": metadata, "spec": msgspec.to_builtins(spec)}
        if after is None:
            request = self._api.send("POST", self._folder, body=body, total_seconds=within_seconds)
        else:
            path = f"{self._folder}/{self._name}"
            request = self._api.send("PUT", path, body=body, total_seconds=within_seconds)
        return await _lease_unless(HTTPStatus.CONFLICT, request)


async def _lease_unless(
    status: HTTPStatus, request: AbstractAsyncContextManager[Answer]
) -> Lease | None:
    """Return the Lease in a response; `None` if the request was rejected with this status."""
    try:
        async with request as answer:
            body = await answer.read(max_bytes=_MAX_LEASE_BYTES)
    except KubernetesError as error:
        if error.status == status:
            return None
        raise
    try:
        document = decode_cut(_decode_document, body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise KubernetesError(f"the API server's response is not a Lease: {error}") from error
    return Lease(metadata=document.metadata, spec=document.spec)


def namespace_of(settings: LeaseSettings, *, own: Path = OWN_NAMESPACE) -> str:
    """Return the Lease's namespace, by default the namespace of this pod.

    Raise `UserError` if the namespace is neither configured nor readable from the pod.
    """
    if settings.namespace:
        return settings.namespace
    try:
        return own.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(
            f"set lease.namespace: there is no service account to take it from ({own}:"
            f" {error.strerror})"
        ) from error


def identity_of(settings: LeaseSettings) -> str:
    """Return the identity in the Lease; the default is unique to this process."""
    return settings.identity or f"{socket.gethostname()}_{uuid4()}"


class LeaseLostError(UnavailableError):
    """The Lease is no longer held, or may have expired."""


class Elector:
    """A candidate for a Lease."""

    def __init__(
        self,
        *,
        cluster: str,
        client: LeaseClient,
        settings: LeaseSettings,
        identity: str,
        check: Check,
        clock: Clock,
        chance: Callable[[], float] = random.random,
        release_seconds: float = RELEASE_SECONDS,
    ) -> None:
        self._leading = pod_metrics.LEADING.labels(cluster=cluster)
        self._client = client
        self._settings = settings
        self._identity = identity
        self._check = check
        self._clock = clock
        self._chance = chance
        self._release_seconds = release_seconds
        self._seen: Lease | None = None
        self._seen_at_ns = 0
        self._held_until_ns: int | None = None

    def must_hold(self) -> None:
        """Raise `LeaseLostError` if this podwatch may no longer hold the Lease."""
        if not self._left_seconds():
            raise LeaseLostError(f"{self._identity} no longer holds the Lease")

    async def acquire(self) -> None:
        """Wait until the Lease is held."""
        spread = RETRY_MAX_FACTOR - 1
        while not await self._attempt():
            # Random, so that candidates do not all write at once.
            pause = self._settings.retry_seconds * (1 - spread + 2 * spread * self._chance())
            # At most until the Lease expires, because then there is no publishing podwatch.
            left = self._free_in_seconds(self._seen) if self._seen else 0.0
            await self._clock.sleep(left if 0 < left < pause else pause)
        self._leading.set(1)
        _log.info("lease_acquired", identity=self._identity)

    async def lead(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work while the Lease is held; release the Lease at the end or when cancelled.

        Return if the Lease is lost. Raise the errors of the work, except `LeaseLostError`.
        """
        try:
            async with run_tasks(work, self._renew()) as (working, renewing):
                await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The work ends before another podwatch can acquire the Lease.
            self._leading.set(0)
            await self._release()
        for task in (working, renewing):
            error = None if task.cancelled() else task.exception()
            # A lost Lease is not an error: the caller acquires it again. The work is a group of
            # tasks, so the error may be in a group with other errors.
            if isinstance(error, BaseExceptionGroup):
                error = error.split(LeaseLostError)[1]
            if error is not None and not isinstance(error, LeaseLostError):
                raise error

    async def _renew(self) -> None:
        """Renew the Lease until it is lost."""
        while left_seconds := self._left_seconds():
            await self._clock.sleep(min(self._settings.retry_seconds, left_seconds))
            # The Lease may have expired during the sleep; then only `acquire` may acquire it.
            if self._left_seconds():
                await self._attempt()
        self._check.failed("the lease was lost")
        _log.info("lease_lost", identity=self._identity)

    async def _attempt(self) -> bool:
        """Try to acquire or renew the Lease; return whether it is held. Errors fail the check."""
        try:
            await self._acquire_or_renew()
        except KubernetesError as error:
            pod_metrics.LEASE_FAILURES.inc()
            namespace = self._settings.namespace
            # In a namespace without permissions, the server answers 403 whether the namespace
            # exists or not, so a misspelt name may give 403 as well as 404.
            named = f"lease.namespace is {namespace!r}: is that the right one?" if namespace else ""
            remedy = ""
            if error.status == HTTPStatus.FORBIDDEN:
                remedy = _NO_PERMISSION + (named and f"; {named}")
            elif error.status == HTTPStatus.NOT_FOUND:
                remedy = named and f": {named}"
            self._check.failed(f"{error.detail}{remedy}")
        else:
            holder = (self._seen and self._seen.spec.holder_identity) or "somebody else"
            # A standby is ready: otherwise a rollout would never finish waiting for a second
            # replica.
            self._check.ok("leading" if self._left_seconds() else f"standing by: {holder} leads")
        return self._left_seconds() > 0

    async def _acquire_or_renew(self) -> None:
        # Read before the first request, because other candidates may measure from the time when the
        # server wrote the Lease.
        began_ns = self._clock.boottime_ns()
        # The two requests must both end before the deadline.
        within_seconds = self._settings.renew_deadline_seconds / 2
        lease = await self._client.read(within_seconds=within_seconds)
        self._observe(lease)
        if lease is not None:
            holder = lease.spec.holder_identity
            if holder and holder != self._identity and self._free_in_seconds(lease) > 0:
                self._held_until_ns = None
                return
        spec = self._claim(lease)
        written = await self._client.write(spec, after=lease, within_seconds=within_seconds)
        # `None` is not a failure: another candidate was faster, and the next attempt reads its
        # Lease.
        if written is not None:
            self._observe(written)
            deadline_ns = round(self._settings.renew_deadline_seconds * NS_PER_SECOND)
            self._held_until_ns = began_ns + deadline_ns

    def _observe(self, lease: Lease | None) -> None:
        """Record the Lease that was read; a changed spec shows that its holder is alive.

        Only the spec counts, because other users may put a label on the Lease.
        """
        if self._seen is None or lease is None or lease.spec != self._seen.spec:
            self._seen_at_ns = self._clock.boottime_ns()
        self._seen = lease

    def _free_in_seconds(self, lease: Lease) -> float:
        # The duration in the Lease, because the settings of its holder may differ from ours.
        duration = lease.spec.lease_duration_seconds or self._settings.duration_seconds
        return duration - (self._clock.boottime_ns() - self._seen_at_ns) / NS_PER_SECOND

    def _claim(self, before: Lease | None) -> LeaseSpec:
        """Return a spec that claims the Lease; a renewal keeps the time of acquisition."""
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
        """Release the Lease, so that others can acquire it at once.

        If the release fails, a warning is logged, and others wait until the Lease expires.
        """
        lease, self._seen = self._seen, None
        self._held_until_ns = None
        if lease is None or lease.spec.holder_identity != self._identity:
            return
        # As in Kubernetes' own components: no holder, and a duration of one second, because the API
        # server rejects 0.
        spec = LeaseSpec(
            holder_identity="",
            lease_duration_seconds=_RELEASED_FOR_SECONDS,
            acquire_time=_timestamp(self._clock),
            renew_time=_timestamp(self._clock),
            lease_transitions=lease.spec.lease_transitions,
        )
        try:
            await self._client.write(spec, after=lease, within_seconds=self._release_seconds)
        except KubernetesError as error:
            _log.warning("lease_release_failed", error=error.detail)
        else:
            _log.info("lease_released", identity=self._identity)

    def _left_seconds(self) -> float:
        """Return how long the Lease is still held, in seconds; 0 if it is not held."""
        if self._held_until_ns is None:
            return 0.0
        return max(0.0, (self._held_until_ns - self._clock.boottime_ns()) / NS_PER_SECOND)


def _timestamp(clock: Clock) -> str:
    """Return the current time in the format of Kubernetes' MicroTime."""
    now = datetime.fromtimestamp(clock.time_ns() / NS_PER_SECOND, tz=UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
