"""How the topic of pods is compared with the API server."""

import pytest

from tests.chaos.published_pods import compare

WANTED = {"uid-a": "7", "uid-b": "9"}


@pytest.mark.parametrize(
    ("published", "missing"),
    [
        pytest.param({"uid-a": "7", "uid-b": "9"}, 0, id="all current"),
        pytest.param({"uid-a": "7", "uid-b": "9", "uid-gone": "3"}, 0, id="one deleted"),
        pytest.param({"uid-a": "6", "uid-b": "9"}, 1, id="an older version"),
        pytest.param({}, 2, id="none"),
    ],
)
def test_a_pod_counts_as_published_if_the_topic_has_its_newest_version(
    published: dict[str, str], missing: int
) -> None:
    assert compare(WANTED, published) == (len(WANTED), missing)
