"""Leader election by a Lease, against a server that keeps it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typing_extensions import override

from gpuledger.errors import BusUnavailableError, UserError
from gpuledger.runtime import Readiness
from gpuledger_enricher.podwatch.api import Api
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.election import (
    RELEASE_SECONDS,
    Elector,
    LeaseClient,
    LeaseLostError,
    identity_of,
    namespace_of,
)
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings, LeaseSettings
from tests.errors import has_words
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import CREATED_NS, PatientClock, soon
from tests.unit.enricher.podwatch.lease_shelf import LeaseShelf
from tests.unit.enricher.podwatch.misbehaving import serving, silence, status, text

PATH = "/apis/coordination.k8s.io/v1/namespaces/ledger/leases/podwatch"
SETTINGS = LeaseSettings(enabled=True, name="podwatch", namespace="ledger")


@pytest.fixture
def shelf() -> LeaseShelf:
    return LeaseShelf()


@pytest.fixture
async def api(shelf: LeaseShelf) -> AsyncIterator[Api]:
    app = web.Application()
    shelf.serve(app)
    async with serving(app) as url, open_api(KubernetesSettings(url=url)) as api:
        yield api


class Candidate:
    """An elector with its own clock and readiness."""

    def __init__(
        self,
        api: Api,
        name: str,
        *,
        clock: PatientClock | None = None,
        release_seconds: float = RELEASE_SECONDS,
    ) -> None:
        self.clock = clock or PatientClock()
        self.check = Readiness().check("lease")
        self.elector = Elector(
            cluster="default",
            client=LeaseClient(api=api, namespace="ledger", name="podwatch"),
            settings=SETTINGS,
            identity=name,
            check=self.check,
            clock=self.clock,
            chance=lambda: 0.5,
            release_seconds=release_seconds,
        )

    def holds(self) -> bool:
        try:
            self.elector.must_hold()
        except LeaseLostError:
            return False
        return True


class SteppedClock(PatientClock):
    """A clock for one sleeper, whose sleep ends when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self._until_ns: int | None = None
        self._due = asyncio.Event()

    @override
    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self._due.clear()
        self._until_ns = self.monotonic_ns() + round(seconds * 1e9)
        await self._due.wait()

    @property
    def is_asleep(self) -> bool:
        return self._until_ns is not None

    async def asleep(self) -> None:
        """Wait until a task sleeps."""
        await soon(lambda: self.is_asleep)

    async def step(self, seconds: float) -> None:
        """Advance the clock once a task sleeps."""
        await self.asleep()
        self.advance(seconds)
        if self._until_ns is not None and self._until_ns <= self.monotonic_ns():
            self._until_ns = None
            self._due.set()


def spec(shelf: LeaseShelf) -> dict[str, Any]:
    found: dict[str, Any] = shelf.kept[PATH]["spec"]
    return found


def held_by(
    holder: str, *, seconds: int = 15, transitions: int = 3, **metadata: object
) -> dict[str, Any]:
    """Return a Lease; its renewal time is nonsense because clocks must not be compared."""
    return {
        "metadata": {"name": "podwatch", **metadata},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": seconds,
            "acquireTime": "2026-11-20T08:00:00.000000Z",
            "renewTime": "1999-01-01T00:00:00.000000Z",
            "leaseTransitions": transitions,
        },
    }


async def test_a_missing_lease_is_created(api: Api, shelf: LeaseShelf) -> None:
    one = Candidate(api, "one")
    await one.elector.acquire()
    assert one.holds()
    assert shelf.requests == ["GET", "POST"]
    when = "2026-11-21T08:00:00.000000Z"
    assert datetime.fromisoformat(when) == datetime.fromtimestamp(CREATED_NS / 1e9, tz=UTC)
    assert spec(shelf) == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "acquireTime": when,
        "renewTime": when,
        "leaseTransitions": 0,
    }
    assert (one.check.is_ok, one.check.detail) == (True, "leading")


async def test_a_released_lease_is_taken_at_once_and_keeps_what_others_wrote(
    api: Api, shelf: LeaseShelf
) -> None:
    shelf.put(PATH, held_by("", labels={"team": "infra"}))
    one = Candidate(api, "one")
    await one.elector.acquire()
    assert one.clock.slept == []
    assert (spec(shelf)["holderIdentity"], spec(shelf)["leaseTransitions"]) == ("one", 4)
    assert shelf.kept[PATH]["metadata"]["labels"] == {"team": "infra"}


async def test_a_silent_holder_is_replaced_when_its_lease_expires_by_our_own_clock(
    api: Api, shelf: LeaseShelf
) -> None:
    shelf.put(PATH, held_by("dead"))
    one = Candidate(api, "one")
    await one.elector.acquire()
    assert sum(one.clock.slept) == pytest.approx(15.0)
    assert max(one.clock.slept) == 2.0
    assert spec(shelf)["holderIdentity"] == "one"


async def test_a_holder_that_renews_stays_whatever_the_times_in_its_lease_are(
    api: Api, shelf: LeaseShelf
) -> None:
    shelf.put(PATH, held_by("alive"))
    clock = SteppedClock()
    one = Candidate(api, "one", clock=clock)
    waiting = asyncio.create_task(one.elector.acquire())
    for number in range(20):
        await clock.step(2.0)
        renewed = held_by("alive")
        renewed["spec"]["renewTime"] = f"1999-01-01T00:00:{number:02}.000000Z"
        shelf.put(PATH, renewed)
    await clock.asleep()
    assert (one.check.is_ok, one.check.detail) == (True, "standing by: alive leads")
    assert not one.holds()
    waiting.cancel()


async def test_one_of_two_concurrent_candidates_gets_the_lease(api: Api, shelf: LeaseShelf) -> None:
    shelf.put(PATH, held_by(""))
    clocks = [SteppedClock() for _ in range(2)]
    both = [
        Candidate(api, name, clock=clock)
        for name, clock in zip(("one", "two"), clocks, strict=True)
    ]
    trying = [asyncio.create_task(each.elector.acquire()) for each in both]
    await soon(lambda: [each.done() for each in trying].count(True) == 1)
    await soon(lambda: sum(clock.is_asleep for clock in clocks) == 1)
    for each in trying:
        each.cancel()
    assert sorted(each.holds() for each in both) == [False, True]
    assert [each.holds() for each in both].index(True) == ["one", "two"].index(
        spec(shelf)["holderIdentity"]
    )


async def work_until(done: asyncio.Event, ended: list[str]) -> None:
    """Work until the event, and record how it ended."""
    try:
        await done.wait()
        ended.append("done")
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise


async def test_a_leader_renews_the_lease_and_releases_it_afterwards(
    api: Api, shelf: LeaseShelf
) -> None:
    clock, done, ended = SteppedClock(), asyncio.Event(), list[str]()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    leading = asyncio.create_task(one.elector.lead(work_until(done, ended)))
    for _ in range(10):
        await clock.step(2.0)
        assert one.holds()
    await clock.asleep()
    assert spec(shelf)["acquireTime"] == "2026-11-21T08:00:00.000000Z"
    assert spec(shelf)["renewTime"] == "2026-11-21T08:00:20.000000Z"
    assert spec(shelf)["leaseTransitions"] == 0
    done.set()
    await leading
    assert (ended, spec(shelf)["holderIdentity"]) == (["done"], "")
    other = Candidate(api, "two")
    await other.elector.acquire()
    assert other.clock.slept == []


async def test_a_signal_ends_the_work_before_the_lease_is_released(
    api: Api, shelf: LeaseShelf
) -> None:
    clock, ended = SteppedClock(), list[str]()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    leading = asyncio.create_task(one.elector.lead(work_until(asyncio.Event(), ended)))
    await clock.asleep()
    leading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leading
    assert (ended, spec(shelf)["holderIdentity"]) == (["cancelled"], "")


@pytest.mark.parametrize(
    "away", [lambda: status(503), lambda: text(502, "bad gateway"), lambda: status(403)]
)
async def test_a_holder_that_cannot_renew_stops_before_others_may_begin(
    api: Api, shelf: LeaseShelf, away: Callable[[], Any]
) -> None:
    clock, ended = SteppedClock(), list[str]()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    leading = asyncio.create_task(one.elector.lead(work_until(asyncio.Event(), ended)))
    shelf.script.extend(away() for _ in range(100))
    for _ in range(4):
        await clock.step(2.0)
    await clock.asleep()
    assert (one.holds(), ended, one.check.is_ok) == (True, [], False)
    await clock.step(2.0)
    await leading
    assert (one.holds(), ended, sum(clock.slept)) == (False, ["cancelled"], 10.0)


async def test_the_lease_duration_counts_from_the_start_of_a_renewal(api: Api) -> None:
    clock = PatientClock()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    clock.advance(9.9)
    assert one.holds()
    clock.advance(0.1)
    assert not one.holds()


async def test_a_lease_that_another_candidate_took_is_lost_at_once(
    api: Api, shelf: LeaseShelf
) -> None:
    clock, ended = SteppedClock(), list[str]()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    leading = asyncio.create_task(one.elector.lead(work_until(asyncio.Event(), ended)))
    shelf.put(PATH, held_by("thief"))
    await clock.step(2.0)
    await leading
    assert (one.holds(), ended) == (False, ["cancelled"])
    assert spec(shelf)["holderIdentity"] == "thief"


async def test_a_process_that_was_suspended_notices_that_its_lease_has_expired(
    api: Api, shelf: LeaseShelf
) -> None:
    """Even a renewal that succeeds comes too late after such a pause, so the work must end."""
    clock, ended = SteppedClock(), list[str]()
    one = Candidate(api, "one", clock=clock)
    await one.elector.acquire()
    leading = asyncio.create_task(one.elector.lead(work_until(asyncio.Event(), ended)))
    await clock.asleep()
    requested = len(shelf.requests)
    await clock.step(60.0)
    await leading
    assert (ended, shelf.requests[requested:]) == (["cancelled"], ["PUT"])
    assert spec(shelf)["holderIdentity"] == ""


async def test_work_that_fails_releases_the_lease_and_its_exception_is_raised(
    api: Api, shelf: LeaseShelf
) -> None:
    async def fail() -> None:
        raise BusUnavailableError("gone")

    one = Candidate(api, "one", clock=SteppedClock())
    await one.elector.acquire()
    with pytest.raises(BusUnavailableError, match="gone"):
        await one.elector.lead(fail())
    assert spec(shelf)["holderIdentity"] == ""


async def test_work_that_ends_because_the_lease_is_lost_is_not_a_failure(api: Api) -> None:
    clock = SteppedClock()
    one = Candidate(api, "one", clock=clock)

    async def publish() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_too_late())

    async def publish_too_late() -> None:
        clock.advance(11)
        one.elector.must_hold()

    await one.elector.acquire()
    await one.elector.lead(publish())


async def test_a_missing_role_is_reported_with_a_remedy(api: Api, shelf: LeaseShelf) -> None:
    shelf.script += [status(403), status(403)]
    clock = SteppedClock()
    one = Candidate(api, "one", clock=clock)
    waiting = asyncio.create_task(one.elector.acquire())
    await soon(lambda: "403" in one.check.detail)
    assert not one.check.is_ok
    assert one.check.detail.endswith(
        "grant its account get and update on this Lease and create on leases; "
        "lease.namespace is 'ledger': is that the right one?"
    )
    await clock.step(2.0)
    await clock.step(2.0)
    await asyncio.wait_for(waiting, HANG_SECONDS)
    assert one.check.is_ok


@pytest.mark.parametrize("answer", ["[]", "{", '{"metadata": {}, "spec": 7}'])
async def test_an_invalid_lease_is_a_failed_attempt(
    api: Api, shelf: LeaseShelf, answer: str
) -> None:
    shelf.script += [text(200, answer)]
    one = Candidate(api, "one")
    await one.elector.acquire()
    assert len(one.clock.slept) == 1


async def test_a_release_that_is_not_answered_does_not_delay_the_end(
    api: Api, shelf: LeaseShelf
) -> None:
    one = Candidate(api, "one", clock=SteppedClock(), release_seconds=0.05)
    await one.elector.acquire()
    shelf.script += [silence()]
    done = asyncio.Event()
    done.set()
    async with asyncio.timeout(2):
        await one.elector.lead(work_until(done, []))
    assert spec(shelf)["holderIdentity"] == "one"


def test_the_namespace_is_that_of_the_service_account_by_default(tmp_path: Path) -> None:
    own = tmp_path / "namespace"
    with pytest.raises(UserError, check=has_words("lease.namespace")):
        namespace_of(LeaseSettings(), own=own)
    own.write_text("ledger\n")
    assert namespace_of(LeaseSettings(), own=own) == "ledger"
    assert namespace_of(LeaseSettings(namespace="other"), own=own) == "other"


def test_by_default_each_process_has_its_own_identity() -> None:
    assert identity_of(LeaseSettings(identity="me")) == "me"
    assert identity_of(LeaseSettings()) != identity_of(LeaseSettings())


@pytest.mark.parametrize(
    "wrong",
    [
        {"duration_seconds": 10.0},
        {"renew_deadline_seconds": 2.5},
        {"duration_seconds": 0.9, "renew_deadline_seconds": 0.5, "retry_seconds": 0.1},
    ],
)
def test_times_that_would_allow_two_leaders_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        LeaseSettings(**wrong)  # type: ignore[arg-type]  # all are seconds
