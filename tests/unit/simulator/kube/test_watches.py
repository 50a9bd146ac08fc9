"""Watches of the played API server over real HTTP."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from gpuledger_simulator.clock import ManualClock
from gpuledger_simulator.kube import KubeApi
from tests.unit.simulator.kube.api_client import Client

Event = dict[str, Any]


async def version(client: Client) -> str:
    _, answer = await client.get()
    found: str = answer["metadata"]["resourceVersion"]
    return found


async def take(events: AsyncIterator[Event], count: int) -> list[Event]:
    return [await anext(events) for _ in range(count)]


def reported(events: list[Event]) -> list[tuple[str, str, str | None]]:
    return [
        (e["type"], e["object"]["metadata"]["name"], e["object"]["status"].get("phase"))
        for e in events
    ]


async def test_a_watch_has_an_event_for_each_step_of_a_pods_life(
    client: Client, api: KubeApi, clock: ManualClock
) -> None:
    events = client.watch(
        resourceVersion=await version(client), fieldSelector="spec.nodeName=node-a"
    )
    clock.advance(9)
    await api.pod_driver.play_due()
    assert reported(await take(events, 5)) == [
        ("ADDED", "chat-5d8f7c9b4d-abcde", "Pending"),
        ("MODIFIED", "chat-5d8f7c9b4d-abcde", "Running"),
        ("MODIFIED", "chat-5d8f7c9b4d-abcde", "Running"),
        ("MODIFIED", "chat-5d8f7c9b4d-abcde", "Running"),
        ("DELETED", "chat-5d8f7c9b4d-abcde", "Running"),
    ]


async def test_a_pod_that_leaves_the_selector_is_reported_as_deleted(
    client: Client, api: KubeApi, clock: ManualClock
) -> None:
    selector = "status.phase!=Succeeded,metadata.name=render-1-xyz"
    events = client.watch(resourceVersion=await version(client), fieldSelector=selector)
    clock.advance(6)
    await api.pod_driver.play_due()
    (event,) = await take(events, 1)
    assert reported([event]) == [("DELETED", "render-1-xyz", "Running")]
    assert event["object"]["metadata"]["resourceVersion"] == await version(client)


async def test_versions_rise_from_event_to_event(
    client: Client, api: KubeApi, clock: ManualClock
) -> None:
    start = await version(client)
    clock.advance(9)
    await api.pod_driver.play_due()
    events = await take(client.watch(resourceVersion=start), 6)
    versions = [int(event["object"]["metadata"]["resourceVersion"]) for event in events]
    assert versions == sorted(set(versions))
    assert versions[0] > int(start)


@pytest.mark.parametrize("query", [{}, {"resourceVersion": "0"}])
async def test_without_a_version_a_watch_begins_with_the_existing_pods(
    client: Client, query: dict[str, str]
) -> None:
    events = await take(client.watch(**query), 2)
    assert [event["type"] for event in events] == ["ADDED", "ADDED"]


async def test_bookmarks_have_the_newest_version_and_no_pod(client: Client) -> None:
    start = await version(client)
    (event,) = await take(client.watch(resourceVersion=start, allowWatchBookmarks="true"), 1)
    assert event["type"] == "BOOKMARK"
    assert event["object"]["metadata"]["resourceVersion"] == start
    assert event["object"]["spec"]["containers"] is None


async def test_requested_initial_events_end_with_a_marked_bookmark(client: Client) -> None:
    query = {
        "sendInitialEvents": "true",
        "resourceVersionMatch": "NotOlderThan",
        "allowWatchBookmarks": "true",
    }
    events = await take(client.watch(**query), 3)
    assert [event["type"] for event in events] == ["ADDED", "ADDED", "BOOKMARK"]
    annotations = events[-1]["object"]["metadata"]["annotations"]
    assert annotations == {"k8s.io/initial-events-end": "true"}


async def test_initial_events_without_a_version_match_are_rejected(client: Client) -> None:
    status, answer = await client.get(watch="true", sendInitialEvents="true")
    assert (status, answer["reason"]) == (422, "Invalid")


async def test_a_version_from_before_a_compaction_is_an_error_event_with_410(
    client: Client, api: KubeApi
) -> None:
    start = await version(client)
    await api.delete_pod("team-b", "render-1-xyz", grace_seconds=0)
    api.compact()
    events = [event async for event in client.watch(resourceVersion=start)]
    assert [event["type"] for event in events] == ["ERROR"]
    assert events[0]["object"]["code"] == 410
    assert events[0]["object"]["reason"] == "Expired"


async def test_a_watch_at_the_newest_version_survives_a_compaction(
    client: Client, api: KubeApi
) -> None:
    events = client.watch(resourceVersion=await version(client), allowWatchBookmarks="true")
    await take(events, 1)
    api.compact()
    await api.delete_pod("team-b", "render-1-xyz", grace_seconds=0)
    seen = await take(events, 3)
    assert "DELETED" in [event["type"] for event in seen]


async def test_a_watch_ends_after_its_timeout(client: Client) -> None:
    query = {"resourceVersion": await version(client), "timeoutSeconds": "0.01"}
    assert [event async for event in client.watch(**query)] == []


async def test_a_cut_connection_breaks_a_running_watch(client: Client, api: KubeApi) -> None:
    events = client.watch(resourceVersion=await version(client), allowWatchBookmarks="true")
    await take(events, 1)
    api.cut_connections()
    with pytest.raises(aiohttp.ClientError):
        await take(events, 99)
