"""Lists that come as a watch if the server supports it, and the fallback if it does not."""

from typing import Any

import pytest

from gpuledger_enricher.podwatch.events import Phase
from tests.unit.enricher.podwatch.builders import Object, PatientClock, pod
from tests.unit.enricher.podwatch.following import (
    follow,
    last,
    reported,
)
from tests.unit.enricher.podwatch.misbehaving import (
    Answering,
    MisbehavingServer,
    bookmark,
    end_mark,
    error,
    event,
    events,
    page,
    status,
    text,
)

WATCHING, LISTING = Phase.WATCHING, Phase.LISTING
PAGES = ["LISTING", "+paged", "LISTED", "WATCHING"]


async def words_until(
    word: str,
    server: MisbehavingServer,
    clock: PatientClock,
    **settings: Any,  # noqa: ANN401  # any setting
) -> list[str]:
    return reported(await follow(server, clock, last(word), **settings))


def added(*uids: str) -> list[Object]:
    return [event("ADDED", pod(uid, version=f"9{number}")) for number, uid in enumerate(uids)]


async def test_a_list_comes_as_a_watch_that_marks_its_end_and_then_continues(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    server.initials += [
        events(*added("a", "b"), end_mark("50"), event("DELETED", pod("a", version="51")))
    ]
    server.watches += [events(*added("c"), keep=True)]
    steps = await words_until("+c", server, clock)
    assert steps == ["LISTING", "+a", "+b", "LISTED", "WATCHING", "-a", "WATCHING", "+c"]
    first, second = server.requests
    assert first == {
        "fieldSelector": "spec.nodeName!=",
        "watch": "true",
        "allowWatchBookmarks": "true",
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "timeoutSeconds": "300",
    }
    assert second["resourceVersion"] == "51"
    assert "sendInitialEvents" not in second


async def test_changes_during_the_list_belong_to_the_list(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    gone = event("DELETED", pod("a", version="48"))
    nowhere = event("MODIFIED", pod("nowhere", node=None, version="49"))
    server.initials += [events(*added("a", "b"), gone, nowhere, end_mark("50"), keep=True)]
    steps = await words_until("WATCHING", server, clock)
    assert steps == ["LISTING", "+a", "+b", "-a", "LISTED", "WATCHING"]


@pytest.mark.parametrize("code", [400, 405, 406, 422, 501])
async def test_a_server_that_refuses_watch_lists_is_queried_by_pages_at_once_and_from_then_on(
    server: MisbehavingServer, clock: PatientClock, code: int
) -> None:
    server.initials += [status(code, reason="Invalid")]
    server.lists += [page(pod("paged"))] * 2
    server.watches += [status(410), events(*added("c"), keep=True)]
    steps = await words_until("+c", server, clock)
    assert steps == [*PAGES[:3], "!410", *PAGES, "+c"]
    assert server.kinds() == ["initial", "list", "watch", "list", "watch"]
    assert clock.slept == [0.8]


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(events(*added("a")), id="ends without the bookmark"),
        pytest.param(events(*added("a"), bookmark("50"), keep=True), id="another bookmark first"),
        pytest.param(events(), id="sends nothing"),
    ],
)
async def test_a_server_that_never_marks_the_end_of_the_list_is_queried_by_pages_from_then_on(
    server: MisbehavingServer, clock: PatientClock, half: Answering
) -> None:
    server.initials += [half]
    server.lists += [page(pod("paged"))] * 2
    server.watches += [status(410), events(*added("c"), keep=True)]
    steps = await words_until("+c", server, clock)
    first = [message for message in steps[: steps.index("LISTED")] if message != "+a"]
    assert first == ["LISTING", "LISTING", "+paged"]
    assert steps[steps.index("LISTED") :] == ["LISTED", "!410", *PAGES, "+c"]
    assert server.kinds() == ["initial", "list", "watch", "list", "watch"]


async def test_without_the_permission_pages_are_tried_each_time(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    server.initials += [status(403), events(end_mark("50"), keep=True)]
    server.lists += [status(403)]
    assert await words_until("WATCHING", server, clock) == [
        "LISTING",
        "!403",
        "LISTING",
        "LISTED",
        "WATCHING",
    ]
    assert server.kinds() == ["initial", "list", "initial"]


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        (status(429, retry_after="2"), "!429"),
        (status(500), "!500"),
        (text(502, "Bad Gateway"), "!502"),
        (events(*added("a"), error(500)), "!500"),
        (events(*added("a"), error(410, "Expired")), "!410"),
        (events(*added("a"), tail=b'{"type"', cut=True), "!None"),
    ],
)
async def test_a_failure_before_the_end_of_the_list_restarts_the_list(
    server: MisbehavingServer, clock: PatientClock, failing: Answering, message: str
) -> None:
    server.initials += [failing, events(*added("b"), end_mark("50"), keep=True)]
    steps = await words_until("WATCHING", server, clock)
    # Data in flight when the connection was cut may or may not have been read.
    assert [step for step in steps if step != "+a"][-5:] == [
        message,
        "LISTING",
        "+b",
        "LISTED",
        "WATCHING",
    ]
    assert server.kinds() == ["initial", "initial"]
    assert len(clock.slept) == 1


async def test_a_list_that_breaks_twice_is_requested_in_pages(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    half = events(*added("a"), tail=b'{"type"')
    server.initials += [half, half]
    server.lists += [page(pod("paged"))]
    steps = await words_until("WATCHING", server, clock)
    assert steps == [*["LISTING", "+a", "!None"] * 2, *PAGES]
    assert server.kinds() == ["initial", "initial", "list", "watch"]


async def test_an_expired_version_leads_to_a_new_list_that_comes_as_a_watch(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    server.initials += [
        events(*added("a"), end_mark("50"), error(410, "Expired")),
        events(*added("b"), end_mark("70"), *added("c"), keep=True),
    ]
    steps = await words_until("+c", server, clock)
    first, second = ["LISTING", "+a", "LISTED"], ["LISTING", "+b", "LISTED"]
    assert steps == [*first, "WATCHING", "!410", *second, "WATCHING", "+c"]


async def test_watch_lists_can_be_disabled(server: MisbehavingServer, clock: PatientClock) -> None:
    server.initials += [events(end_mark("50"), keep=True)]
    server.lists += [page(pod("paged"))]
    assert await words_until("WATCHING", server, clock, watch_list="off") == PAGES
    assert server.kinds() == ["list", "watch"]
