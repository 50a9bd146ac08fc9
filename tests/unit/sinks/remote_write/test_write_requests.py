"""Which ticks travel together: a refusal of one must not take new ones of other nodes with it."""

from collections.abc import Sequence

import pytest

from gpuledger.bus.protocol import Record
from sinks.remote_write.active_series import EncodedTick
from sinks.remote_write.write_requests import WrittenTick, split_into_requests


def ticks(nodes: str) -> list[WrittenTick]:
    """Return a tick of each node, a capital one of a node that was sent something later."""
    return [
        WrittenTick(
            node=node.lower(),
            time_ns=1,
            record=Record("t", 0, offset, 0, None, b""),
            encoded=EncodedTick(body=b"", samples=2, is_behind=node.isupper()),
        )
        for offset, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "together"),
    [
        ("abcd", ["abcd"]),
        ("aBcd", ["a", "b", "cd"]),
        ("Abc", ["a", "bc"]),
        ("abC", ["ab", "c"]),
        ("ABC", ["a", "b", "c"]),
        ("abab", ["ab", "ab"]),
        ("abcdef", ["abcd", "ef"]),
    ],
)
def test_what_is_behind_goes_alone_and_all_else_together_once_a_node(
    nodes: str, together: Sequence[str]
) -> None:
    requests = split_into_requests(ticks(nodes), max_samples=8, repeated_before=0)

    assert ["".join(tick.node for tick in request.ticks) for request in requests] == together


def test_what_may_have_been_sent_before_goes_alone() -> None:
    requests = split_into_requests(ticks("abcd"), max_samples=8, repeated_before=2)

    assert ["".join(tick.node for tick in request.ticks) for request in requests] == [
        "a",
        "b",
        "cd",
    ]
