"""What the lines of a watch tell, however the server writes them."""

import json
from collections.abc import Callable

import pytest

from enricher.podwatch.decode import PodReader
from enricher.podwatch.events import Bookmark, EventReader, Passed
from enricher.podwatch.steps import Deleted, Seen
from tests.unit.enricher.podwatch.given import Object, encoded, pod
from tests.unit.enricher.podwatch.misbehaving import bookmark, end_mark, event


def spaced(item: Object) -> bytes:
    return json.dumps(item, indent=1).encode().replace(b"\n", b" ")


def turned(item: Object) -> bytes:
    return encoded(dict(reversed(item.items())))


@pytest.fixture
def events() -> EventReader:
    return EventReader(PodReader(labels=[], gpu_resource_prefixes=[]))


@pytest.mark.parametrize("write", [encoded, spaced, turned])
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (event("ADDED", pod("a", version="5")), (Seen, "5")),
        (event("MODIFIED", pod("a", version="6")), (Seen, "6")),
        (event("DELETED", pod("a", version="7")), (Deleted, "7")),
        (event("ADDED", pod("a", node=None, version="8")), (Passed, "8")),
        (event("DELETED", pod("a", metadata={"labels": 5, "resourceVersion": "9"})), (Passed, "9")),
        (event("ADDED", {"metadata": {"resourceVersion": "10"}}), (Passed, "10")),
        (event("ADDED", {}), (Passed, "")),
        (bookmark("11"), (Bookmark, "11")),
        (end_mark("12"), (Bookmark, "12")),
        (event("NOVELTY", pod("a")), None),
    ],
)
def test_a_line_tells_the_same_in_every_way_to_write_it(
    events: EventReader,
    write: Callable[[Object], bytes],
    item: Object,
    expected: tuple[type, str] | None,
) -> None:
    found = events.read(write(item))
    match found:
        case Seen(record) | Deleted(record):
            assert (type(found), record.resource_version) == expected
        case Passed(version) | Bookmark(version):
            assert (type(found), version) == expected
        case None:
            assert expected is None


@pytest.mark.parametrize(
    ("notes", "ends"),
    [
        ({"k8s.io/initial-events-end": "true"}, True),
        ({"k8s.io/initial-events-end": "false"}, False),
        ({"other": "true"}, False),
        (None, False),
    ],
)
def test_only_its_annotation_makes_a_bookmark_the_end_of_a_list(
    events: EventReader, notes: dict[str, str] | None, *, ends: bool
) -> None:
    assert events.read(encoded(bookmark("5", annotations=notes))) == Bookmark("5", ends_list=ends)
