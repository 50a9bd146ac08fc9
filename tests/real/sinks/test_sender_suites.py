"""The public suites for senders of remote-write, run on the sink's series, requests and client.

Prometheus's suite for 2.0 is a Go program. Its suite for 1.0 is not in any module that can be
fetched, so its cases are written here under their original names; each runs with 1.0 and, against a
receiver of 2.0, with `auto`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from gpuledger_sinks.remote_write.wire import STALE_VALUE, encode_value
from tests.real.sinks.scraping_sender import send_pages
from tests.unit.deployment.components import ROOT
from tests.unit.sinks.builders import eventually, running
from tests.unit.sinks.receiver import Answer, Receiver, receiving
from tests.unit.sinks.remote_write.oracle import (
    RequestV2,
    Series,
    WriteRequest,
    decompress,
    parse_compressed,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

SUITE_SECONDS = 120.0
CASES = {
    "_setup": "MUST",
    "value": "MUST",
    "timestamp": "MUST",
    "start_timestamp_for_counters": "SHOULD",
    "start_timestamp_for_histograms": "SHOULD",
}
"""The cases of this version of the suite, with their level."""


@pytest.mark.parametrize("protocol", ["", "auto"])
def test_the_public_suite_for_senders_of_2_0_passes(
    remote_write_compliance: Path, protocol: str
) -> None:
    done = subprocess.run(
        [remote_write_compliance, "-test.v", f"-test.timeout={SUITE_SECONDS:.0f}s"],
        cwd=ROOT,
        env={**os.environ, "COMPLIANCE_PYTHON": sys.executable, "COMPLIANCE_PROTOCOL": protocol},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * SUITE_SECONDS,
    )

    passed = set(re.findall(r"--- PASS: TestSender/\S+/rw2/(\S+) ", done.stdout))
    assert (done.returncode, passed) == (0, set(CASES)), done.stdout + done.stderr
    assert "--- SKIP" not in done.stdout


both = pytest.mark.parametrize("protocol", ["1.0", "auto"])
HISTOGRAM = """\
# TYPE histogram histogram
histogram_bucket{le="1"} 1
histogram_bucket{le="2"} 2
histogram_bucket{le="+Inf"} 2
histogram_sum 3
histogram_count 2
"""
SUMMARY = """\
# TYPE summary summary
summary{quantile="0.5"} 1
summary_sum 3
summary_count 2
"""


@asynccontextmanager
async def showing(*texts: str) -> AsyncIterator[str]:
    """Serve these texts in turn, and then the last one forever; yields the address."""
    left = list(texts)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=left.pop(0) if len(left) > 1 else left[0])

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/metrics"
    finally:
        await runner.cleanup()


async def sent(
    *texts: str,
    protocol: str,
    until: Callable[[Receiver], object],
    answer: Callable[[bytes], Answer] | None = None,
) -> tuple[Receiver, str]:
    """Send pages until the condition holds; return the receiver and the page's host and port."""
    async with receiving(by_body=answer or written) as receiver, showing(*texts) as page:
        sending = send_pages(
            page, receiver.url, protocol=protocol, job="test", interval_seconds=0.02
        )
        async with running(sending):
            await eventually(partial(until, receiver))
        return receiver, page.split("/")[2]


def written(body: bytes) -> Answer:
    """Accept requests of either version, and count the written samples."""
    samples = str(len(parse_compressed(body)))
    return Answer(204, headers={"X-Prometheus-Remote-Write-Samples-Written": samples})


def received(by: Receiver, name: str, **labels: str) -> list[Series]:
    """Return the received samples of series with a name, in the order of arrival."""
    wanted = {"__name__": name, **labels}.items()
    return [
        one
        for request in by.received
        for one in parse_compressed(request.body)
        if wanted <= dict(one.labels).items()
    ]


def ups(receiver: Receiver) -> set[float]:
    return {one.value for one in received(receiver, "up", job="test")}


@both
@pytest.mark.parametrize(
    ("case", "page", "values"),
    [
        ("Counter", "# TYPE counter counter\ncounter 42\n", {"counter": [42]}),
        ("Gauge", "# TYPE gauge gauge\ngauge 42\n", {"gauge": [42]}),
        (
            "Histogram",
            HISTOGRAM,
            {"histogram_bucket": [1, 2, 2], "histogram_sum": [3], "histogram_count": [2]},
        ),
        ("Summary", SUMMARY, {"summary": [1], "summary_sum": [3], "summary_count": [2]}),
        ("Up", "gauge 42\n", {"up": [1]}),
        ("Invalid", "\n# this is not valid\n1234notvali}{ 444\n", {"up": [0]}),
        ("RepeatedLabels", '# TYPE test gauge\ntest{a="1",a="1"} 1.0\n', {"up": [0], "test": []}),
        ("NameLabel", '# TYPE test gauge\n{label="value"} 1.0\n', {"up": [0], "test": []}),
    ],
)
async def test_samples(case: str, page: str, values: dict[str, list[float]], protocol: str) -> None:
    receiver, _ = await sent(page, protocol=protocol, until=ups)

    first = parse_compressed(receiver.received[0].body)
    for name, expected in values.items():
        assert [one.value for one in first if one.name == name] == expected, case
    assert ups(receiver) == set(values.get("up", [1]))


@both
@pytest.mark.parametrize(
    ("case", "labels", "expected"),
    [
        ("JobLabel", "", {"job": "test"}),
        ("InstanceLabel", "", {"instance": "TARGET"}),
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
    receiver, target = await sent(f"test{labels} 1\n", protocol=protocol, until=ups)

    (one,) = [s for s in parse_compressed(receiver.received[0].body) if s.name == "test"]
    names = [name for name, _ in one.labels]
    assert names == sorted(names)
    assert all(value for _, value in one.labels)
    found = {name: (one.label(name) or "").replace(target, "TARGET") or None for name in expected}
    assert found == expected, case


def bits_in(body: bytes) -> list[bytes]:
    """Return the bits of all values of a request."""
    plain = decompress(body)
    kind = RequestV2 if plain[:1] == b"\x22" else WriteRequest
    return [encode_value(one.samples[0].value) for one in kind.FromString(plain).timeseries]


@both
async def test_staleness(protocol: str) -> None:
    receiver, _ = await sent(
        "stale 1\n", "", protocol=protocol, until=lambda by: len(received(by, "stale")) == 2
    )

    ends = [STALE_VALUE in bits_in(request.body) for request in receiver.received]
    assert ends.count(True) == 1


@both
async def test_timestamp_and_ordering(protocol: str) -> None:
    receiver, _ = await sent(
        "".join(f'test{{i="{number}"}} 1\n' for number in range(1000)),
        protocol=protocol,
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
    receiver, _ = await sent("now 1\n", protocol=protocol, until=ups)

    for request in receiver.received:
        assert request.headers["Content-Encoding"] == "snappy"
        shown = ("Content-Type", "X-Prometheus-Remote-Write-Version")
        assert tuple(request.headers[name] for name in shown) == HEADERS[protocol]


@both
@pytest.mark.parametrize(
    ("case", "status", "is_sent_again"), [("Retries500", 500, True), ("Retries400", 400, False)]
)
async def test_retries(case: str, status: int, is_sent_again: bool, protocol: str) -> None:  # noqa: FBT001  # a column of the table
    # A 400 before any count has been returned may mean that 2.0 is not supported.
    taken_before = 1 if protocol == "auto" else 0
    answers = iter([*[204] * taken_before, status])

    def answer(body: bytes) -> Answer:
        code = next(answers, 204)
        return written(body) if code == 204 else Answer(code, "no")

    receiver, _ = await sent(
        "now 1\n",
        protocol=protocol,
        until=lambda by: len(received(by, "now")) >= 4,
        answer=answer,
    )

    times = [one.time_ms for one in received(receiver, "now")]
    assert (times.count(times[taken_before]) == 2) is is_sent_again, case
