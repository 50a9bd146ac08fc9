"""Which podwatch publishes: the one that holds the Lease, as Kubernetes' own components elect.

A Lease is an object like any other; who may hold it is agreed among those who read it. What makes
it safe is that a write names the `resourceVersion` that was read: of two that take it at once the
server refuses one, with 409.

Clocks of different machines are never compared: whoever waits measures by its own clock for how
long the Lease has not changed, and the times in it are for people. A holder counts from the moment
at which it began its last successful renewal, and gives up (`renew_deadline_seconds`) well before
anybody else may take the Lease (`duration_seconds`). It counts in time that goes on while the
machine sleeps.
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
"""How long the end of podwatch may wait for the Lease to be released."""
_RELEASED_FOR_SECONDS: Final = 1
_MAX_LEASE_BYTES: Final = 32 * 2**20  # as of any object: etcd refuses far less
_KIND: Final = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
_NO_PERMISSION: Final = ": grant its account get and update on this Lease and create on leases"
_log = structlog.get_logger(__name__)


class LeaseSpec(msgspec.Struct, rename="camel", frozen=True, omit_defaults=True):
    """Who holds a Lease, in the server's own words."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class _Document(msgspec.Struct):
    """The whole object; what others wrote on it is written again as it was."""

    metadata: dict[str, Any]
    spec: LeaseSpec = LeaseSpec()


_decode_document: Final = msgspec.json.Decoder(_Document).decode


@dataclass(frozen=True, kw_only=True)
class Lease:
    """A Lease as the server has it."""

    metadata: Mapping[str, Any]
    """With the version that a write must name, or it is refused."""
    spec: LeaseSpec


class LeaseClient:
    """Reads and writes one Lease; `KubernetesError` where the server does not answer or refuses."""

    def __init__(self, *, api: Api, namespace: str, name: str) -> None:
        self._api = api
        self._name = name
        self._folder = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self, *, within_seconds: float) -> Lease | None:
        """Return the Lease, `None` where there is none."""
        path = f"{self._folder}/{self._name}"
        request = self._api.get(
            path, query={}, idle_timeout_seconds=within_seconds, total_seconds=within_seconds
        )
        return await _lease_unless(HTTPStatus.NOT_FOUND, request)

    async def write(
        self, spec: LeaseSpec, *, after: Lease | None, within_seconds: float
    ) -> Lease | None:
        """Write it, where it is as it was read; `None` where somebody else was faster."""
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
    """Return the Lease of an answer, `None` for a refusal with that status."""
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
        raise KubernetesError(f"the API server sent no Lease: {error}") from error
    return Lease(metadata=document.metadata, spec=document.spec)


def namespace_of(settings: LeaseSettings, *, own: Path = OWN_NAMESPACE) -> str:
    """Return the Lease's namespace; `UserError` where nothing names it."""
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
    """Return the name under which the Lease is held; by default one of this process alone."""
    return settings.identity or f"{socket.gethostname()}_{uuid4()}"


class LeaseLostError(UnavailableError):
    """The Lease is not held any more, or may not be."""


class Elector:
    """One candidate for a Lease."""

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
        """Raise `LeaseLostError` where another one may hold the Lease."""
        if not self._left_seconds():
            raise LeaseLostError(f"{self._identity} does not hold the Lease any more")

    async def acquire(self) -> None:
        """Wait until the Lease is held."""
        spread = RETRY_MAX_FACTOR - 1
        while not await self._attempt():
            # By chance, so that candidates do not all write at once.
            pause = self._settings.retry_seconds * (1 - spread + 2 * spread * self._chance())
            # No longer than the Lease lasts: nobody publishes from then on.
            left = self._free_in_seconds(self._seen) if self._seen else 0.0
            await self._clock.sleep(left if 0 < left < pause else pause)
        self._leading.set(1)
        _log.info("lease_acquired", identity=self._identity)

    async def lead(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work for as long as the Lease is held, then or when cancelled release it.

        Raises what the work raises.
        """
        try:
            async with run_tasks(work, self._renew()) as (working, renewing):
                await asyncio.wait({working, renewing}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # The work has ended before the Lease is another one's.
            self._leading.set(0)
            await self._release()
        for task in (working, renewing):
            error = None if task.cancelled() else task.exception()
            # That the Lease was lost is no failure: the next attempt to acquire it follows. The
            # work is a group of tasks, so it may come among others.
            if isinstance(error, BaseExceptionGroup):
                error = error.split(LeaseLostError)[1]
            if error is not None and not isinstance(error, LeaseLostError):
                raise error

    async def _renew(self) -> None:
        """Renew until the Lease is lost."""
        while left_seconds := self._left_seconds():
            await self._clock.sleep(min(self._settings.retry_seconds, left_seconds))
            # It may have run out in that sleep; to take it again is for `acquire`.
            if self._left_seconds():
                await self._attempt()
        self._check.failed("the lease was lost")
        _log.info("lease_lost", identity=self._identity)

    async def _attempt(self) -> bool:
        """Try once to acquire or renew, and return whether it is held; a failure is not raised."""
        try:
            await self._acquire_or_renew()
        except KubernetesError as error:
            pod_metrics.LEASE_FAILURES.inc()
            namespace = self._settings.namespace
            # In a namespace that is not its own an account has no right, whether there is one or
            # not: a misspelt name is answered with 403 as well as with 404.
            named = f"lease.namespace is {namespace!r}: is that the right one?" if namespace else ""
            remedy = ""
            if error.status == HTTPStatus.FORBIDDEN:
                remedy = _NO_PERMISSION + (named and f"; {named}")
            elif error.status == HTTPStatus.NOT_FOUND:
                remedy = named and f": {named}"
            self._check.failed(f"{error.detail}{remedy}")
        else:
            holder = (self._seen and self._seen.spec.holder_identity) or "somebody else"
            # Ready while standing by, or a rollout would wait for ever for its second replica.
            self._check.ok("leading" if self._left_seconds() else f"standing by: {holder} leads")
        return self._left_seconds() > 0

    async def _acquire_or_renew(self) -> None:
        # Before the first request: others may count from when the server has written it.
        began_ns = self._clock.boottime_ns()
        # Two requests, that both end before the deadline.
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
        # `None` is no failure: another one was faster, and the next attempt reads who it is.
        if written is not None:
            self._observe(written)
            deadline_ns = round(self._settings.renew_deadline_seconds * NS_PER_SECOND)
            self._held_until_ns = began_ns + deadline_ns

    def _observe(self, lease: Lease | None) -> None:
        """Record what was read; a change of the spec is a sign of life from whoever holds it.

        Of the spec alone: anybody may put a label on the Lease.
        """
        if self._seen is None or lease is None or lease.spec != self._seen.spec:
            self._seen_at_ns = self._clock.boottime_ns()
        self._seen = lease

    def _free_in_seconds(self, lease: Lease) -> float:
        # The holder's own duration: its settings may differ from ours.
        duration = lease.spec.lease_duration_seconds or self._settings.duration_seconds
        return duration - (self._clock.boottime_ns() - self._seen_at_ns) / NS_PER_SECOND

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
        # As Kubernetes' own components do: no holder, and a duration of a second, because the API
        # server refuses one of 0.
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
        """Return for how long the Lease is held; 0 where it is not."""
        if self._held_until_ns is None:
            return 0.0
        return max(0.0, (self._held_until_ns - self._clock.boottime_ns()) / NS_PER_SECOND)


def _timestamp(clock: Clock) -> str:
    """Return the time as Kubernetes' MicroTime."""
    now = datetime.fromtimestamp(clock.time_ns() / NS_PER_SECOND, tz=UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
