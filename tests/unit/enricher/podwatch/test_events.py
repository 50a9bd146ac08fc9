"""The lines of a watch mean the same, however the server writes them."""

import json
from collections.abc import Callable

import pytest
from msgspec import Raw

from gpuledger_enricher.podwatch.events import (
    Bookmark,
    Deleted,
    Passed,
    Skipped,
    Upserted,
    WatchReader,
)
from tests.unit.enricher.podwatch.builders import Object, encoded, pod, reader_of
from tests.unit.enricher.podwatch.misbehaving import bookmark, end_mark, event


def spaced(item: Object) -> bytes:
    return json.dumps(item, indent=1).encode().replace(b"\n", b" ")


def turned(item: Object) -> bytes:
    return encoded(dict(reversed(item.items())))


@pytest.fixture
def events() -> WatchReader:
    return WatchReader(reader_of(), kind="pod")


@pytest.mark.parametrize("write", [encoded, spaced, turned])
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (event("ADDED", pod("a", version="5")), (Upserted, "5")),
        (event("MODIFIED", pod("a", version="6")), (Upserted, "6")),
        (event("DELETED", pod("a", version="7")), (Deleted, "7")),
        (event("ADDED", pod("a", node=None, version="8")), (Passed, "8")),
        (
            event("DELETED", pod("a", version="9", metadata={"labels": 5})),
            (Skipped, "9"),
        ),
        (event("ADDED", {"metadata": {"resourceVersion": "10"}}), (Skipped, "10")),
        (event("ADDED", {}), (Skipped, "")),
        (bookmark("11"), (Bookmark, "11")),
        (end_mark("12"), (Bookmark, "12")),
        (event("NOVELTY", pod("a")), None),
    ],
)
def test_a_line_means_the_same_however_it_is_written(
    events: WatchReader,
    write: Callable[[Object], bytes],
    item: Object,
    expected: tuple[type, str] | None,
) -> None:
    found = events.read(write(item))
    match found:
        case Upserted(record) | Deleted(record):
            assert (type(found), record.resource_version) == expected
        case Passed(version) | Bookmark(version) | Skipped(version=version):
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
    events: WatchReader, notes: dict[str, str] | None, *, ends: bool
) -> None:
    assert events.read(encoded(bookmark("5", annotations=notes))) == Bookmark("5", ends_list=ends)


def deep(item: Object, levels: int = 10_000) -> bytes:
    """Return the JSON of an object nested too deeply for json to write."""
    open_, close = b'{"f:]}":' * levels, b"}" * levels
    return encoded(item).replace(b'"spec":', b'"managed":' + open_ + b"{}" + close + b',"spec":')


@pytest.mark.parametrize("kind", ["ADDED", "MODIFIED", "DELETED"])
def test_a_pod_nested_too_deeply_for_any_decoder_is_read_like_another(
    events: WatchReader, kind: str
) -> None:
    item = event(kind, pod("a", version="5"))
    assert events.read(deep(item)) == events.read(encoded(item))
    assert events.item(Raw(deep(pod("a")))) == events.item(Raw(encoded(pod("a"))))


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(
            encoded(event("MODIFIED", pod("a"))).replace(b'"Running"', b'"\xff"'), id="not UTF-8"
        ),
        pytest.param(
            encoded(event("MODIFIED", pod("a", metadata={"labels": 5}))), id="another type"
        ),
        pytest.param(
            deep(event("MODIFIED", pod("a", metadata={"labels": 5}))),
            id="a deep one of another type",
        ),
    ],
)
def test_a_pod_that_cannot_be_read_is_named(events: WatchReader, line: bytes) -> None:
    found = events.read(line)
    assert isinstance(found, Skipped)
    assert (found.uid, found.name, found.version) == ("a", "team-red/pod-a", "7")
