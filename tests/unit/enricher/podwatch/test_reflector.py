"""The reflector against an API server that misbehaves in every way seen so far."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from gpuledger import __version__
from gpuledger_enricher.podwatch.api import Api, KubernetesError
from gpuledger_enricher.podwatch.connect import open_api
from gpuledger_enricher.podwatch.events import Interrupted, Phase, Step, Upserted
from gpuledger_enricher.podwatch.pod_settings import KubernetesSettings
from gpuledger_enricher.podwatch.reflector import MAX_PAGE_BYTES, Reflector
from tests.hanging import HANG_SECONDS
from tests.unit.enricher.podwatch.builders import (
    PatientClock,
    pod,
    write_kubeconfig,
)
from tests.unit.enricher.podwatch.following import as_word, nth, reflector_of, reported, steps_until
from tests.unit.enricher.podwatch.misbehaving import (
    Answering,
    MisbehavingServer,
    bookmark,
    error,
    event,
    events,
    mute,
    page,
    silence,
    status,
    text,
)

IDLE_TIMEOUT_SECONDS = 0.02
WATCHING, LISTING, LISTED = Phase.WATCHING, Phase.LISTING, Phase.LISTED


@pytest.fixture
def settings(server: MisbehavingServer, tmp_path: Path) -> KubernetesSettings:
    return KubernetesSettings(
        kubeconfig=str(write_kubeconfig(tmp_path / "kubeconfig", url=server.url, token="secret")),
        page_limit=2,
        idle_timeout_seconds=60.0,
        backoff_first_seconds=1.6,
        backoff_max_seconds=30.0,
    )


@pytest.fixture
async def api(settings: KubernetesSettings) -> AsyncIterator[Api]:
    async with open_api(settings) as api:
        yield api


@pytest.fixture
def reflector(api: Api, settings: KubernetesSettings, clock: PatientClock) -> Reflector:
    return reflector_of(api, settings, clock)


async def test_all_pages_of_a_list_come_before_the_watch(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [page(pod("a"), pod("b"), continue_token="t 1/2"), page(pod("c"), version="9")]
    server.watches += [events(event("ADDED", pod("d", version="12")), keep=True)]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+d")
    assert reported(steps) == ["LISTING", "+a", "+b", "+c", "LISTED", "WATCHING", "+d"]
    first, second, watch = server.requests
    assert (first["limit"], second["continue"]) == ("2", "t 1/2")
    assert (watch["resourceVersion"], watch["allowWatchBookmarks"]) == ("9", "true")
    assert watch["timeoutSeconds"] == "300"
    assert server.tokens[0] == "Bearer secret"
    assert server.agents == {f"gpuledger-podwatch/{__version__}"}


async def test_a_watch_continues_from_the_newest_event_or_bookmark(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [page(version="1")]
    server.watches += [
        events(event("MODIFIED", pod("a", version="5"))),
        events(bookmark("8")),
        events(event("DELETED", pod("a", version="9"))),
        events(event("ADDED", pod("b", node=None, version="11"))),
    ]
    steps = await steps_until(reflector, nth(WATCHING, 5))
    assert reported(steps)[2:] == ["WATCHING", "+a", *["WATCHING"] * 2, "-a", *["WATCHING"] * 2]
    assert [query["resourceVersion"] for query in server.requests[1:]] == ["1", "5", "8", "9", "11"]
    assert server.kinds() == ["list"] + ["watch"] * 5


TOO_NEW = {"causes": [{"reason": "ResourceVersionTooLarge"}]}


@pytest.mark.parametrize(
    ("gone", "word"),
    [
        pytest.param(status(410, reason="Expired"), "!410", id="as an HTTP answer"),
        pytest.param(events(error(410, "Expired")), "!410", id="as an ERROR event"),
        pytest.param(status(504, reason="Timeout", details=TOO_NEW), "!504", id="as too new"),
    ],
)
async def test_an_expired_version_leads_to_a_new_list(
    server: MisbehavingServer, reflector: Reflector, gone: Answering, word: str
) -> None:
    server.lists += [page(pod("a"), version="1"), page(pod("b"), version="50")]
    server.watches += [gone, events(event("ADDED", pod("c", version="51")), keep=True)]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+c")
    first, second = ["LISTING", "+a", "LISTED"], ["LISTING", "+b", "LISTED"]
    assert [message for message in reported(steps) if message != "WATCHING"] == [
        *first,
        word,
        *second,
        "+c",
    ]
    assert server.kinds() == ["list", "watch", "list", "watch"]
    assert server.requests[3]["resourceVersion"] == "50"


async def test_a_page_that_is_too_large_is_requested_again_with_fewer_pods(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [text(200, " " * (MAX_PAGE_BYTES + 1)), page(pod("a"))]
    steps = await steps_until(reflector, nth(WATCHING, 1))
    assert reported(steps) == ["LISTING", "+a", "LISTED", "WATCHING"]
    assert [query["limit"] for query in server.requests[:2]] == ["2", "1"]


async def test_an_expired_page_restarts_the_list(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [
        page(pod("a"), continue_token="old"),
        status(410, reason="Expired"),
        page(pod("b")),
    ]
    steps = await steps_until(reflector, nth(WATCHING, 1))
    assert reported(steps) == ["LISTING", "+a", "!410", "LISTING", "+b", "LISTED", "WATCHING"]
    assert "continue" not in server.requests[2]


@pytest.mark.parametrize(
    ("failing", "word"),
    [
        (status(500), "!500"),
        (status(503), "!503"),
        (text(502, "<html>Bad Gateway</html>"), "!502"),
        (events(error(500)), "!500"),
        (events(event("ERROR", {"code": "not a number"})), "!None"),
        (events(tail=b'{"type":"ADDED","obj'), "!None"),
        (events(tail=b'{"type":"ADDED","obj', cut=True), "!None"),
        (events(tail=b"no JSON at all\n"), "!None"),
    ],
)
async def test_a_failure_is_reported_and_the_watch_continues_where_it_was(
    server: MisbehavingServer, reflector: Reflector, failing: Answering, word: str
) -> None:
    server.lists += [page(version="3")]
    server.watches += [failing, events(event("ADDED", pod("a")), keep=True)]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+a")
    assert word in reported(steps)
    assert server.kinds() == ["list", "watch", "watch"]
    assert [query["resourceVersion"] for query in server.requests[1:]] == ["3", "3"]


async def test_a_watch_without_changes_is_restarted_where_it_was_and_is_not_a_failure(
    server: MisbehavingServer, api: Api, settings: KubernetesSettings, clock: PatientClock
) -> None:
    impatient = KubernetesSettings(
        kubeconfig=settings.kubeconfig, idle_timeout_seconds=IDLE_TIMEOUT_SECONDS
    )
    server.lists += [page(version="3")]
    marked = events(bookmark("4"), keep=True)
    server.watches += [marked, silence(), events(event("ADDED", pod("a")), keep=True)]
    steps = await steps_until(
        reflector_of(api, impatient, clock), lambda taken: as_word(taken[-1]) == "+a"
    )
    assert [step for step in steps if isinstance(step, Interrupted)] == []
    assert server.kinds() == ["list", "watch", "watch", "watch"]
    assert [query["resourceVersion"] for query in server.requests[1:]] == ["3", "4", "4"]


async def test_a_server_that_vanished_behind_a_silent_watch_is_reported_at_the_next_request(
    server: MisbehavingServer, api: Api, settings: KubernetesSettings, clock: PatientClock
) -> None:
    impatient = KubernetesSettings(
        kubeconfig=settings.kubeconfig, idle_timeout_seconds=IDLE_TIMEOUT_SECONDS
    )
    server.watches += [silence(), mute()]
    steps = await steps_until(
        reflector_of(api, impatient, clock), lambda taken: isinstance(taken[-1], Interrupted)
    )
    (interruption,) = [step for step in steps if isinstance(step, Interrupted)]
    assert "silent for too long" in str(interruption.error)


async def test_a_server_that_closes_at_once_is_queried_ever_more_rarely(
    server: MisbehavingServer, reflector: Reflector, clock: PatientClock
) -> None:
    server.watches += [events() for _ in range(7)]
    await steps_until(reflector, nth(WATCHING, 8))
    assert clock.slept == [0.8, 1.6, 3.2, 6.4, 12.8, 15.0, 15.0]


async def test_a_watch_that_lived_is_resumed_at_once(
    server: MisbehavingServer, reflector: Reflector, clock: PatientClock
) -> None:
    server.watches += [events(), events(event("ADDED", pod("a"))), events()]
    steps: list[Step] = []
    async with asyncio.timeout(HANG_SECONDS), aclosing(reflector.run()) as coming:
        async for step in coming:
            steps.append(step)
            if isinstance(step, Upserted):
                clock.advance(300)
            if steps.count(WATCHING) == 4:
                break
    assert clock.slept == [0.8, 0.0, 0.8]


async def test_a_failed_watch_that_lived_is_resumed_after_the_first_pause(
    server: MisbehavingServer, reflector: Reflector, clock: PatientClock
) -> None:
    server.watches += [events(), events(), events(event("ADDED", pod("a")), error(500))]
    async with asyncio.timeout(HANG_SECONDS), aclosing(reflector.run()) as coming:
        async for step in coming:
            if isinstance(step, Upserted):
                clock.advance(300)
            if len(clock.slept) == 3:
                break
    assert clock.slept == [0.8, 1.6, 0.8]


@pytest.mark.parametrize(
    ("header", "pause_seconds"), [("7", 7.0), ("0", 0.8), ("soon", 0.8), ("86400", 300.0)]
)
async def test_a_requested_retry_delay_is_kept_within_bounds(
    server: MisbehavingServer,
    reflector: Reflector,
    clock: PatientClock,
    header: str,
    pause_seconds: float,
) -> None:
    server.lists += [status(429, reason="TooManyRequests", retry_after=header), page()]
    steps = await steps_until(reflector, nth(WATCHING, 1))
    assert reported(steps) == ["LISTING", "!429", "LISTING", "LISTED", "WATCHING"]
    assert clock.slept == [pause_seconds]


async def test_an_object_of_three_megabytes_is_handled_like_any_other(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    large = pod("large", metadata={"annotations": {"blob": "x" * 3_000_000}})
    server.watches += [events(event("ADDED", large), event("ADDED", pod("small")), keep=True)]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+small")
    assert reported(steps)[-2:] == ["+large", "+small"]


async def test_an_unknown_event_type_is_skipped(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.watches += [
        events(
            event("NOVELTY", pod("a")),
            {"object": pod("b")},
            {"type": "ADDED"},
            event("ADDED", pod("c")),
            tail=b"\n",
            keep=True,
        )
    ]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+c")
    assert reported(steps) == ["LISTING", "LISTED", "WATCHING", "?", "+c"]


async def test_a_pod_that_cannot_be_read_does_not_affect_the_others(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    odd = pod("odd", metadata={"labels": "none"})
    server.lists += [page(odd, pod("a"))]
    server.watches += [events(event("ADDED", odd), event("ADDED", pod("b")), keep=True)]
    steps = await steps_until(reflector, lambda taken: as_word(taken[-1]) == "+b")
    assert reported(steps) == ["LISTING", "?odd", "+a", "LISTED", "WATCHING", "?odd", "+b"]


async def test_an_invalid_list_is_a_failure_and_not_an_empty_list(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [text(200, "<html>Please log in</html>"), page(pod("a"))]
    steps = await steps_until(reflector, nth(WATCHING, 1))
    assert reported(steps) == ["LISTING", "!None", "LISTING", "+a", "LISTED", "WATCHING"]


async def test_a_missing_role_is_reported_with_a_remedy(
    server: MisbehavingServer, reflector: Reflector
) -> None:
    server.lists += [status(403, reason="Forbidden")]
    steps = await steps_until(reflector, lambda taken: isinstance(taken[-1], Interrupted))
    reported_error = steps[-1]
    assert isinstance(reported_error, Interrupted)
    assert str(reported_error.error) == (
        "the API server answered 403: says 403:"
        " grant its account get, list and watch on pods, nodes and namespaces in a ClusterRole"
    )


async def test_credentials_are_reread_after_a_refusal(
    server: MisbehavingServer, reflector: Reflector, settings: KubernetesSettings
) -> None:
    server.lists += [status(401), page()]
    async with asyncio.timeout(HANG_SECONDS), aclosing(reflector.run()) as steps:
        async for step in steps:
            if isinstance(step, Interrupted):
                write_kubeconfig(Path(settings.kubeconfig), url=server.url, token="renewed")
            if step is LISTED:
                break
    assert server.tokens == ["Bearer secret", "Bearer renewed"]


async def test_an_unreachable_api_server_is_an_interruption(
    api: Api, settings: KubernetesSettings, clock: PatientClock, tmp_path: Path
) -> None:
    nowhere = write_kubeconfig(tmp_path / "nowhere", url="http://127.0.0.1:9", token="secret")
    elsewhere = KubernetesSettings(kubeconfig=str(nowhere))
    async with open_api(elsewhere) as absent:
        steps = await steps_until(
            reflector_of(absent, elsewhere, clock), lambda taken: isinstance(taken[-1], Interrupted)
        )
    assert isinstance(steps[-1], Interrupted)
    assert isinstance(steps[-1].error, KubernetesError)
    assert "cannot read from the API server http://127.0.0.1:9: " in str(steps[-1].error)
