"""The cases of Prometheus' suite for senders of remote-write 1.0, by their names there.

That suite is in no module that can be fetched; that of 2.0 is, and `tests/real/sinks` runs it. Each
case is asked of the version that it is about, and of `auto` against a receiver of 2.0.
"""

import struct
from collections.abc import Callable

import pytest

from gpuledger_sinks.remote_write.wire import STALE_VALUE, encode_value
from tests.unit.sinks.builders import eventually
from tests.unit.sinks.receiver import Answer, Receiver, receiving
from tests.unit.sinks.remote_write.openmetrics.scraped_pages import (
    answering,
    received,
    scraping,
    showing,
    written,
)
from tests.unit.sinks.remote_write.oracle import (
    RequestV2,
    Series,
    WriteRequest,
    decompress,
    parse_compressed,
)

both = pytest.mark.parametrize("protocol", ["1.0", "auto"])
TYPES = {
    "Counter": ("# TYPE counter counter\ncounter 42\n", {"counter": [42]}),
    "Gauge": ("# TYPE gauge gauge\ngauge 42\n", {"gauge": [42]}),
    "Histogram": (
        """\
# TYPE histogram histogram
histogram_bucket{le="1"} 1
histogram_bucket{le="2"} 2
histogram_bucket{le="+Inf"} 2
histogram_sum 3
histogram_count 2
""",
        {"histogram_bucket": [1, 2, 2], "histogram_sum": [3], "histogram_count": [2]},
    ),
    "Summary": (
        '# TYPE summary summary\nsummary{quantile="0.5"} 1\nsummary_sum 3\nsummary_count 2\n',
        {"summary": [1], "summary_sum": [3], "summary_count": [2]},
    ),
}


async def sent(page: str, protocol: str, *, until: Callable[[Receiver], object]) -> Receiver:
    """Return the receiver of a page that says this, once that holds of it."""
    async with receiving(by_body=written) as receiver, showing(page) as shown:
        async with scraping(shown.url, receiver, protocol=protocol):
            await eventually(lambda: until(receiver))
        return receiver


def ups(receiver: Receiver, value: float) -> list[Series]:
    return [one for one in received(receiver, "up", job="test") if one.value == value]


@both
@pytest.mark.parametrize("case", TYPES)
async def test_types(case: str, protocol: str) -> None:
    page, values = TYPES[case]

    receiver = await sent(page, protocol, until=lambda by: received(by, next(iter(values))))

    first = parse_compressed(receiver.received[0].body)
    for name, expected in values.items():
        assert [one.value for one in first if one.name == name] == expected


@both
async def test_up(protocol: str) -> None:
    receiver = await sent("gauge 42\n", protocol, until=lambda by: ups(by, 1))

    assert not ups(receiver, 0)


@both
@pytest.mark.parametrize(
    ("case", "page"),
    [
        ("Invalid", "\n# this is not valid\n1234notvali}{ 444\n"),
        ("RepeatedLabels", '# TYPE test gauge\ntest{a="1",a="1"} 1.0\n'),
        ("NameLabel", '# TYPE test gauge\n{label="value"} 1.0\n'),
    ],
)
async def test_a_page_that_is_none(case: str, page: str, protocol: str) -> None:
    receiver = await sent(page, protocol, until=lambda by: ups(by, 0))

    assert not received(receiver, "test"), case
    assert not ups(receiver, 1)


@both
@pytest.mark.parametrize(
    ("case", "labels", "expected"),
    [
        ("JobLabel", "", {"job": "test"}),
        ("SortedLabels", '{b="2",a="1"}', {"a": "1", "b": "2"}),
        ("EmptyLabels", '{a=""}', {"a": None}),
        (
            "HonorLabels",
            '{job="original",instance="foo"}',
            {"exported_job": "original", "exported_instance": "foo", "job": "test"},
        ),
    ],
)
async def test_labels(
    case: str, labels: str, expected: dict[str, str | None], protocol: str
) -> None:
    receiver = await sent(f"test{labels} 1\n", protocol, until=lambda by: received(by, "test"))

    for one in received(receiver, "test"):
        names = [name for name, _ in one.labels]
        assert names == sorted(names)
        assert all(value for _, value in one.labels)
        assert {name: one.label(name) for name in expected} == expected, case


@both
async def test_instance_label(protocol: str) -> None:
    async with (
        receiving(by_body=written) as receiver,
        showing("gauge 42\n") as shown,
        scraping(shown.url, receiver, protocol=protocol),
    ):
        await eventually(lambda: received(receiver, "gauge"))

    instance = shown.url.removeprefix("http://").removesuffix("/metrics")
    assert {one.label("instance") for one in received(receiver, "gauge")} == {instance}


def values_of(body: bytes) -> list[bytes]:
    """Return the bits of all values of a request."""
    plain = decompress(body)
    kind = RequestV2 if plain[:1] == b"\x22" else WriteRequest
    return [encode_value(one.samples[0].value) for one in kind.FromString(plain).timeseries]


@both
async def test_staleness(protocol: str) -> None:
    async with (
        receiving(by_body=written) as receiver,
        showing("stale 1\n", "") as shown,
        scraping(shown.url, receiver, protocol=protocol),
    ):
        await eventually(lambda: len(received(receiver, "stale")) == 2)

    ends = [STALE_VALUE in values_of(request.body) for request in receiver.received]
    assert ends.count(True) == 1
    assert struct.pack("<Q", 0x7FF0000000000002) == STALE_VALUE


@both
async def test_timestamp_and_ordering(protocol: str) -> None:

    receiver = await sent(
        "".join(f'test{{i="{number}"}} 1\n' for number in range(1000)),
        protocol,
        until=lambda by: len(received(by, "test", i="999")) >= 4,
    )

    latest: dict[tuple[tuple[str, str], ...], int] = {}
    for one in received(receiver, "test"):
        assert latest.get(one.labels, 0) < one.time_ms
        latest[one.labels] = one.time_ms
    assert len(latest) == 1000


HEADERS = {
    "1.0": ("application/x-protobuf", "0.1.0"),
    "auto": ("application/x-protobuf;proto=io.prometheus.write.v2.Request", "2.0.0"),
}


@both
async def test_headers(protocol: str) -> None:
    receiver = await sent("now 1\n", protocol, until=lambda by: received(by, "now"))

    for request in receiver.received:
        assert request.headers["Content-Encoding"] == "snappy"
        shown = ("Content-Type", "X-Prometheus-Remote-Write-Version")
        assert tuple(request.headers[name] for name in shown) == HEADERS[protocol]


@both
@pytest.mark.parametrize(
    ("case", "status", "is_sent_again"), [("Retries500", 500, True), ("Retries400", 400, False)]
)
async def test_retries(case: str, status: int, is_sent_again: bool, protocol: str) -> None:  # noqa: FBT001  # a column of the table
    # What 2.0 is answered before it was ever counted is sent in 1.0: it may be all that is spoken.
    taken_before = [204] if protocol == "auto" else []
    async with (
        receiving(by_body=after(taken_before, answering([status]))) as receiver,
        showing("now 1\n") as shown,
        scraping(shown.url, receiver, protocol=protocol),
    ):
        await eventually(lambda: len(received(receiver, "now")) >= 4)

    times = [one.time_ms for one in received(receiver, "now")]
    refused = times[len(taken_before)]
    assert (times.count(refused) == 2) is is_sent_again, case


def after(taken: list[int], then: Callable[[bytes], Answer]) -> Callable[[bytes], Answer]:
    """Take as many requests first."""
    left = list(taken)

    def answer(body: bytes) -> Answer:
        if left:
            left.pop()
            return written(body)
        return then(body)

    return answer
