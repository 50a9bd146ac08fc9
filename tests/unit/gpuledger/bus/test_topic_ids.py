"""A topic was recreated if its ID changed; an unknown ID is not a change."""

import pytest

from gpuledger.bus.topic_ids import Found, TopicIds


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        pytest.param({"events": "A"}, {"events": "A"}, set(), id="the same"),
        pytest.param({"events": "A"}, {"events": "B"}, {"events"}, id="recreated"),
        pytest.param({"events": "A"}, {}, set(), id="deleted"),
        pytest.param({}, {"events": "A"}, {"events"}, id="absent before"),
        pytest.param({}, {"events": None}, {"events"}, id="absent before, without ID"),
        pytest.param({"events": None}, {"events": "A"}, set(), id="ID becomes known"),
        pytest.param({"events": "A"}, {"events": None}, set(), id="ID becomes unknown"),
        pytest.param(None, {"events": "A"}, set(), id="brokers did not answer"),
        pytest.param(None, {"events": None}, set(), id="brokers did not answer, without ID"),
    ],
)
def test_topics_that_were_recreated_are_found(
    before: Found | None, now: Found, others: set[str]
) -> None:
    assert TopicIds(before).update(now) == others


@pytest.mark.parametrize("before", [{"events": None}, None])
def test_an_id_that_becomes_known_is_compared_from_then_on(before: Found | None) -> None:
    known = TopicIds(before)
    known.update({"events": "A"})
    known.update({"events": None})

    assert known.by_topic == {"events": "A"}
    assert known.update({"events": "B"}) == {"events"}
