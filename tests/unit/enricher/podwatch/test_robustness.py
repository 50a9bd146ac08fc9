"""The reflector against servers that are mute, slow, endless, or ask for long waits."""

from collections.abc import Mapping

import pytest

from gpuledger_enricher.podwatch.events import Interrupted, Phase, Step
from tests.podwatch_cluster import published
from tests.unit.enricher.podwatch.builders import PatientClock, pod
from tests.unit.enricher.podwatch.following import follow, last, nth, reported
from tests.unit.enricher.podwatch.misbehaving import (
    Answering,
    MisbehavingServer,
    bookmark,
    end_mark,
    error,
    event,
    events,
    mute,
    page,
    status,
    trickle,
)

SHORT_SECONDS = 0.5  # an immediate answer must arrive within it even on a busy machine
BLOB = {"annotations": {"blob": "x" * 3_000_000}}


def first_error(steps: list[Step]) -> str:
    return next(str(step.error) for step in steps if isinstance(step, Interrupted))


@pytest.mark.parametrize(
    ("lists", "watches", "settings", "what"),
    [
        pytest.param(
            [mute()], [], {"page_timeout_seconds": SHORT_SECONDS}, "cannot read from", id="a list"
        ),
        pytest.param([], [mute()], {"idle_timeout_seconds": SHORT_SECONDS}, "silent", id="a watch"),
        pytest.param(
            [trickle(b" ")],
            [],
            {"page_timeout_seconds": SHORT_SECONDS},
            "not done in time",
            id="a list that never comes to its end",
        ),
        pytest.param(
            [],
            [trickle(b"\n")],
            {"idle_timeout_seconds": SHORT_SECONDS, "watch_timeout_seconds": SHORT_SECONDS},
            "not done in time",
            id="a watch beyond its timeout",
        ),
    ],
)
async def test_no_request_waits_for_a_server_without_a_limit(  # noqa: PLR0917  # pytest names them
    server: MisbehavingServer,
    clock: PatientClock,
    lists: list[Answering],
    watches: list[Answering],
    settings: Mapping[str, float],
    what: str,
) -> None:
    server.lists += lists
    server.watches += [*watches, events(event("ADDED", pod("a")), keep=True)]
    steps = await follow(server, clock, last("+a"), **settings)
    assert what in first_error(steps)


async def test_a_list_that_comes_as_a_watch_has_a_time_limit(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    server.initials += [mute(), events(event("ADDED", pod("a")), end_mark("9"), keep=True)]
    steps = await follow(server, clock, nth(Phase.WATCHING, 1), idle_timeout_seconds=SHORT_SECONDS)
    assert reported(steps) == ["!None", "LISTING", "+a", "LISTED", "WATCHING"]
    assert "silent for too long" in first_error(steps)


@pytest.mark.parametrize(
    ("chance", "expected"),
    [
        (0.0, [0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0]),
        (0.5, [1.2, 2.4, 4.8, 9.6, 19.2, 22.5, 22.5]),
        (1.0, [1.6, 3.2, 6.4, 12.8, 25.6, 30.0, 30.0]),
    ],
)
async def test_pauses_are_randomized_and_grow_from_eight_tenths_of_a_second_to_thirty(
    server: MisbehavingServer, clock: PatientClock, chance: float, expected: list[float]
) -> None:
    server.lists += [status(500) for _ in range(7)]
    await follow(server, clock, nth(Phase.WATCHING, 1), chance=chance)
    assert [round(seconds, 6) for seconds in clock.slept] == expected


@pytest.mark.parametrize(("chance", "requested"), [(0.0, "300"), (0.5, "450"), (1.0, "600")])
async def test_watches_that_began_together_do_not_end_together(
    server: MisbehavingServer, clock: PatientClock, chance: float, requested: str
) -> None:
    await follow(server, clock, nth(Phase.WATCHING, 1), chance=chance)
    assert server.requests[-1]["timeoutSeconds"] == requested


@pytest.mark.parametrize(
    "busy",
    [
        pytest.param(status(429, retry_after="7"), id="as an HTTP answer"),
        pytest.param(
            events(error(429, details={"retryAfterSeconds": 7})),
            id="as an ERROR event",
        ),
        pytest.param(status(503, retry_after="7"), id="with another status"),
    ],
)
async def test_a_watch_waits_as_long_as_the_server_requests(
    server: MisbehavingServer, clock: PatientClock, busy: Answering
) -> None:
    server.watches += [busy, events(event("ADDED", pod("a")), keep=True)]
    await follow(server, clock, last("+a"))
    assert clock.slept == [7.0]
    assert server.kinds() == ["list", "watch", "watch"]


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(status(410, reason="Expired"), id="as an HTTP answer"),
        pytest.param(events(error(410, "Expired")), id="as an ERROR event"),
        pytest.param(events(bookmark("60"), error(410, "Gone")), id="after a bookmark"),
    ],
)
@pytest.mark.parametrize("as_a_watch", [False, True])
async def test_deletions_that_an_expired_watch_missed_come_with_the_new_list(
    server: MisbehavingServer, clock: PatientClock, gone: Answering, *, as_a_watch: bool
) -> None:
    for uids in ("abc", "bd"):
        if as_a_watch:
            found = [event("ADDED", pod(uid)) for uid in uids]
            server.initials += [events(*found, end_mark("50"))]
        else:
            server.lists += [page(*(pod(uid) for uid in uids))]
    server.watches += [gone]
    steps = await follow(server, clock, nth(Phase.LISTED, 2))
    assert published(steps) == {"a": "deleted", "b": "alive", "c": "deleted", "d": "alive"}


@pytest.mark.parametrize("way", ["page", "initial", "watch"])
async def test_objects_of_three_megabytes_are_read_in_every_way(
    server: MisbehavingServer, clock: PatientClock, way: str
) -> None:
    large, small = pod("large", metadata=BLOB), pod("small")
    lines = [event("ADDED", large), event("ADDED", small)]
    match way:
        case "page":
            server.lists += [page(large, small)]
        case "initial":
            server.initials += [events(*lines, end_mark("9"), keep=True)]
        case _:
            server.watches += [events(*lines, keep=True)]
    steps = await follow(server, clock, last("+small"))
    assert reported(steps)[-2:] == ["+large", "+small"]
    assert not [step for step in steps if isinstance(step, Interrupted)]


@pytest.mark.parametrize("way", ["page", "initial"])
async def test_a_known_pod_that_becomes_unreadable_is_not_mistaken_for_deleted(
    server: MisbehavingServer, clock: PatientClock, way: str
) -> None:
    known, unreadable = pod("a"), pod("a", metadata={"labels": 5})
    gone = error(410, "Expired")
    if way == "page":
        server.lists += [page(known, pod("b")), page(unreadable, pod("c"))]
    else:
        for one, other in ((known, "b"), (unreadable, "c")):
            listed = [event("ADDED", one), event("ADDED", pod(other))]
            server.initials += [events(*listed, end_mark("50"))]
    server.watches += [events(gone)]
    steps = await follow(server, clock, nth(Phase.LISTED, 2))
    assert published(steps) == {"a": "alive", "b": "deleted", "c": "alive"}


async def test_pages_that_are_too_large_are_requested_in_smaller_ones(
    server: MisbehavingServer, clock: PatientClock
) -> None:
    large = [pod(name, metadata=BLOB) for name in "abcdefghijkl"]  # 36 MB
    server.lists += [page(*large), page(*large[:6], continue_token="more"), page(*large[6:])]
    steps = await follow(server, clock, last("WATCHING"), page_limit=12)
    assert reported(steps) == [
        "LISTING",
        *(f"+{name}" for name in "abcdefghijkl"),
        "LISTED",
        "WATCHING",
    ]
    limits = [query.get("limit") for query in server.requests]
    assert limits == ["12", "3", "3", None]


@pytest.mark.parametrize(
    "line",
    [
        b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"\xff"}}}\n',
        b'{"type":"ADDED","object":{"metadata":{"uid":"x","resourceVersion":"\xff"}}}\n',
        b'{"type":"BOOKMARK","object":[]}\n',
        b'{"type":"ADDED","object":null}\n',
    ],
)
async def test_an_object_that_cannot_be_read_is_skipped(
    server: MisbehavingServer, clock: PatientClock, line: bytes
) -> None:
    server.lists += [page(version="5")]
    server.watches += [events(tail=line), events(event("ADDED", pod("a")), keep=True)]
    steps = await follow(server, clock, last("+a"))
    assert not [step for step in steps if isinstance(step, Interrupted)]
    assert server.requests[-1]["resourceVersion"] == "5"
