"""A record stands under the key of the node that it speaks of."""

import pytest

from tests.unit.enricher.join.given import Given
from tests.unit.enricher.join.incidents import incident, incident_record
from tests.unit.enricher.join.ticks import record, sample


@pytest.fixture
def given() -> Given:
    """Return a stage that has read nothing."""
    return Given()


@pytest.mark.parametrize("key", [b"node-b", b"", None])
async def test_a_tick_under_another_key_than_its_nodes_is_put_aside_and_moves_no_mark(
    given: Given, key: bytes | None
) -> None:
    """So whoever may write under one key alone cannot speak for another node."""
    given.take(seq=1000)
    assert given.stage.take_samples([record(sample(seq=9000), offset=9)._replace(key=key)]) == []
    assert given.take(seq=2000).seq == 2000
    (letter,) = await given.letters()
    assert letter.reason == "foreign_key"
    assert "node-a" in letter.detail


async def test_incidents_and_processes_stand_under_their_nodes_key_too(given: Given) -> None:
    """Those of another are neither attributed nor counted."""
    assert given.stage.take_incidents([incident_record(incident())._replace(key=b"node-b")]) == []
    assert len(given.stage.take_incidents([incident_record(incident())])) == 1
    (letter,) = await given.letters()
    assert letter.reason == "foreign_key"
