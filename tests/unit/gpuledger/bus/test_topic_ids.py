"""A topic is another one where its identity is another; where that is not known, it is not."""

import pytest

from gpuledger.bus.topic_ids import Found, TopicIds


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        pytest.param({"events": "A"}, {"events": "A"}, set(), id="the same"),
        pytest.param({"events": "A"}, {"events": "B"}, {"events"}, id="made anew"),
        pytest.param({"events": "A"}, {}, set(), id="gone"),
        pytest.param({}, {"events": "A"}, {"events"}, id="absent before"),
        pytest.param({}, {"events": None}, {"events"}, id="absent before, without identity"),
        pytest.param({"events": None}, {"events": "A"}, set(), id="identities come"),
        pytest.param({"events": "A"}, {"events": None}, set(), id="identities go"),
        pytest.param(None, {"events": "A"}, set(), id="brokers could not be asked"),
        pytest.param(None, {"events": None}, set(), id="could not be asked, without identity"),
    ],
)
def test_what_is_another_topic(before: Found | None, now: Found, others: set[str]) -> None:
    assert TopicIds(before).update(now) == others


@pytest.mark.parametrize("before", [{"events": None}, None])
def test_an_identity_that_becomes_known_is_compared_from_then_on(before: Found | None) -> None:
    known = TopicIds(before)
    known.update({"events": "A"})
    known.update({"events": None})

    assert known.by_topic == {"events": "A"}
    assert known.update({"events": "B"}) == {"events"}
