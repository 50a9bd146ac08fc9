"""What a page and a receiver may do while one is scraped for the other: the loop goes on."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs
from typing_extensions import override

from gpuledger.errors import SettingsError
from gpuledger.runtime import Check, Readiness
from gpuledger.settings import Secret
from gpuledger_sinks.remote_write.openmetrics.exposition import OPENMETRICS
from gpuledger_sinks.remote_write.openmetrics.scrape_client import instance_of
from gpuledger_sinks.remote_write.openmetrics.scraped_series import (
    EncodedScrape,
    Scrape,
    ScrapedSeries,
    TimeLimits,
)
from gpuledger_sinks.remote_write.openmetrics.scraping import ScrapeSender, run_scraping
from gpuledger_sinks.remote_write.request_writer import Writer
from gpuledger_sinks.remote_write.write_client import Payload
from gpuledger_sinks.settings import OpenMetricsSettings, RemoteWriteSettings
from tests.fakes.hostile_http import (
    HUGE_PAGES,
    MIB,
    NO_HTTP,
    Raw,
    packed_zeros,
    page,
)
from tests.fakes.hostile_http import answering as answering_raw
from tests.unit.sinks.builders import START_NS, eventually
from tests.unit.sinks.receiver import Answer, Receiver, receiving
from tests.unit.sinks.remote_write.openmetrics.scraped_pages import (
    answering,
    counted,
    received,
    scraping,
    showing,
    written,
)
from tests.unit.sinks.remote_write.oracle import (
    Described,
    decompress,
    parse_exemplars_v2,
    parse_metadata,
    parse_v2,
)

OK = b"HTTP/1.1 200 OK\r\n"
GOOD = page(b"m 1\n", b"Content-Type: text/plain; version=0.0.4", status=OK)
BAD_PAGES: dict[str, tuple[Raw, str]] = {
    "junk": (page(b"\xff\0", b"Content-Type: text/plain", status=OK), "unreadable"),
    "a page for people": (page(b"<p>", b"Content-Type: text/html", status=OK), "unreadable"),
    "no end": (
        page(b"m 1\n", b"Content-Type: application/openmetrics-text", status=OK),
        "unreadable",
    ),
    "404": (page(b"no", status=b"HTTP/1.1 404 Not Found\r\n"), "refused"),
    "elsewhere": (page(b"", b"Location: /m", status=b"HTTP/1.1 302 Found\r\n"), "refused"),
    "a body that breaks off": (Raw(begin=OK + b"Content-Length: 99\r\n\r\nm 1"), "unreachable"),
    "no gzip": (page(b"m 1\n", b"Content-Encoding: gzip", status=OK), "unreachable"),
    "half of gzip": (
        page(packed_zeros(MIB)[:-20], b"Content-Encoding: gzip", status=OK),
        "unreachable",
    ),
    "a page without end": (Raw(begin=OK + b"\r\n", again=b"m 1\n" * 9999, times=999), "too_large"),
    "gigabytes in gzip": (
        page(packed_zeros(300 * MIB), b"Content-Encoding: gzip", status=OK),
        "too_large",
    ),
    **{what: (raw, "refused") for what, raw in HUGE_PAGES.items()},
    # A connection that is closed without a word is tried once more, within the scrape.
    **{what: (raw, "unreachable") for what, raw in NO_HTTP.items() if what != "nothing"},
}


def detail_of(readiness: Readiness) -> str:
    """Return what the check of the page says."""
    return str(json.loads(json.dumps(readiness.report()))["checks"]["remote_write.openmetrics"])


@pytest.mark.parametrize("what", BAD_PAGES)
async def test_a_scrape_that_fails_is_counted_and_said_and_the_next_one_is_made(what: str) -> None:
    bad, outcome = BAD_PAGES[what]
    before = counted("gpuledger_sink_scrapes_total", outcome=outcome)
    async with (
        receiving(by_body=written) as receiver,
        answering_raw([GOOD, bad, GOOD]) as hostile,
        scraping(hostile.url, receiver, page={"max_body_bytes": MIB}) as readiness,
    ):
        await eventually(lambda: [one.value for one in received(receiver, "up")][2:])
        found = [one.value for one in received(receiver, "up")][:3]

        assert found == [1, 0, 1]
        assert readiness.is_ready()
    assert counted("gpuledger_sink_scrapes_total", outcome=outcome) == before + 1
    assert len(received(receiver, "m")) >= 3  # its end among them


async def test_a_page_that_hangs_is_waited_for_until_the_deadline_and_no_longer() -> None:
    async with receiving(by_body=written) as receiver, showing("m 1\n") as shown:
        shown.hangs = asyncio.Event()
        async with scraping(shown.url, receiver, page={"timeout_seconds": 0.05}) as readiness:
            await eventually(lambda: received(receiver, "up"))
            assert received(receiver, "up")[0].value == 0
            assert "not done in time" in detail_of(readiness)

            shown.hangs.set()
            await eventually(lambda: received(receiver, "m"))


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "look at the login (remote_write.openmetrics.username and .password"),
        (404, "look at remote_write.openmetrics.url"),
    ],
)
async def test_a_page_that_refuses_names_the_setting(status: int, words: str) -> None:
    refusing = page(b"no", status=b"HTTP/1.1 %d No\r\n" % status)
    async with (
        receiving(by_body=written) as receiver,
        answering_raw([refusing]) as hostile,
        scraping(hostile.url, receiver) as readiness,
    ):
        await eventually(lambda: received(receiver, "up"))

        assert words in detail_of(readiness)


async def test_a_target_that_is_not_there_is_down() -> None:
    async with receiving(by_body=written) as receiver, showing("m 1\n") as gone:
        pass
    async with receiving(by_body=written) as receiver, scraping(gone.url, receiver):
        await eventually(lambda: received(receiver, "up"))

    assert {one.value for one in received(receiver, "up")} == {0}


async def test_the_page_is_asked_for_as_a_scraper_asks() -> None:
    async with (
        receiving(by_body=written) as receiver,
        showing("m 1\n") as shown,
        scraping(shown.url, receiver, page={"bearer_token": Secret("secret")}),
    ):
        await eventually(lambda: shown.asked)

    headers = shown.asked[0].headers
    assert headers["Accept"].startswith("application/openmetrics-text;version=1.0.0")
    assert headers["X-Prometheus-Scrape-Timeout-Seconds"] == "10"
    assert headers["Accept-Encoding"] == "gzip"
    assert headers["Authorization"] == "Bearer secret"


OPEN_PAGE = """\
# HELP jobs Jobs that were done.
# TYPE jobs counter
jobs_total 3 # {trace_id="abc"} 1.5 1700000001.25
jobs_created 1700000000.5
# HELP size_bytes Size.
# TYPE size_bytes gauge
# UNIT size_bytes bytes
size_bytes 9
# EOF
"""


async def test_in_2_0_starts_exemplars_and_what_is_told_go_along() -> None:
    async with (
        receiving(by_body=written) as receiver,
        showing(OPEN_PAGE, content_type=OPENMETRICS) as shown,
        scraping(shown.url, receiver),
    ):
        await eventually(lambda: receiver.received)

    body = decompress(receiver.received[0].body)
    found = {one.series.name: one for one in parse_v2(body)}
    assert found["jobs_total"].start_ms == 1_700_000_000_500
    assert found["jobs_total"].described == Described("counter", "Jobs that were done.", "")
    assert found["size_bytes"].described == Described("gauge", "Size.", "bytes")
    assert [one for one in parse_exemplars_v2(body) if one] == [
        [((("trace_id", "abc"),), 1.5, 1_700_000_001_250)]
    ]


async def test_in_1_0_what_is_told_goes_along_with_the_first_request() -> None:
    async with (
        receiving() as receiver,
        showing(OPEN_PAGE, content_type=OPENMETRICS) as shown,
        scraping(shown.url, receiver, protocol="1.0"),
    ):
        await eventually(lambda: receiver.received[1:])

    told, then = (parse_metadata(decompress(one.body)) for one in receiver.received[:2])
    assert told["jobs_total"] == Described("counter", "Jobs that were done.", "")
    assert told["up"].kind == "gauge"
    assert not then


async def test_a_receiver_of_1_0_is_found_out_and_gets_every_scrape() -> None:
    async with (
        receiving() as receiver,  # which says nothing of what it has written
        showing("m 1\n") as shown,
        scraping(shown.url, receiver),
    ):
        await eventually(lambda: len(receiver.received) >= 4)

    versions = [one.headers["X-Prometheus-Remote-Write-Version"] for one in receiver.received]
    assert versions[:4] == ["2.0.0", "0.1.0", "0.1.0", "0.1.0"]


@pytest.mark.parametrize("protocol", ["1.0", "2.0", "auto"])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
async def test_what_is_refused_is_counted_and_not_sent_again(status: int, protocol: str) -> None:
    before = counted("gpuledger_sink_dropped_total", reason="rejected")
    refusing = answering([status])
    taken: list[bytes] = []

    def answer(body: bytes) -> Answer:
        taken.append(body)
        return written(body) if len(taken) == 1 else refusing(body)

    async with (
        receiving(by_body=answer) as receiver,
        showing("m 1\n") as shown,
        scraping(shown.url, receiver, protocol=protocol),
    ):
        await eventually(lambda: len(received(receiver, "m")) >= 4)
        times = [one.time_ms for one in received(receiver, "m")]

    assert len(set(times)) == len(times)
    assert counted("gpuledger_sink_dropped_total", reason="rejected") == before + 6


async def test_what_is_written_in_part_is_counted_so() -> None:
    sent, partial = (
        counted("gpuledger_sink_sent_total"),
        counted("gpuledger_sink_dropped_total", reason="partial"),
    )
    part = Answer(400, "no", {"X-Prometheus-Remote-Write-Samples-Written": "4"})
    async with (
        receiving(part, by_body=lambda _: Answer(503)) as receiver,
        showing("m 1\n") as shown,
        scraping(shown.url, receiver, protocol="2.0"),
    ):
        await eventually(lambda: receiver.received[1:])

    assert counted("gpuledger_sink_sent_total") == sent + 4
    assert counted("gpuledger_sink_dropped_total", reason="partial") == partial + 2


async def test_what_the_receiver_fails_at_is_sent_once_it_is_back() -> None:
    async with (
        receiving(by_body=answering([503, 429, 500])) as receiver,
        showing("m 1\n") as shown,
        scraping(shown.url, receiver, protocol="2.0"),
    ):
        await eventually(lambda: len(received(receiver, "m")) >= 6)

    times = [one.time_ms for one in received(receiver, "m")]
    assert times[:4] == [times[0]] * 4
    assert times[3:] == sorted(set(times[3:]))


@asynccontextmanager
async def silent() -> AsyncIterator[Receiver]:
    """Yield a receiver that takes requests and answers none."""
    asked = asyncio.Event()

    async def take(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asked.wait()
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield Receiver(url=f"http://{host}:{port}")
    finally:
        asked.set()
        server.close()


async def test_beyond_what_may_wait_no_scrape_is_made_which_is_counted_and_said() -> None:
    before = counted("gpuledger_sink_scrapes_total", outcome="skipped")
    async with (
        silent() as receiver,
        showing("m 1\n") as shown,
        scraping(shown.url, receiver, queue_bytes=3000) as readiness,
    ):
        await eventually(
            lambda: counted("gpuledger_sink_scrapes_total", outcome="skipped") > before + 2
        )

        assert len(shown.asked) == 3
        assert 3000 <= counted("gpuledger_sink_waiting_bytes") < 4000
        assert "remote_write.queue_bytes" in detail_of(readiness)


class HeldWriter(Writer):
    """Writes nothing until it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.written = 0

    @override
    async def write(self, message: Payload, *, ticks: int) -> int:
        await self.may.wait()
        self.written += ticks
        return message.samples


def a_scrape() -> EncodedScrape:
    target = {"job": "test", "instance": "host:80"}
    limits = TimeLimits(max_ahead_ms=0, max_age_ms=None)
    series = ScrapedSeries(**target, external_labels={}, limits=limits)
    return series.add(Scrape(time_ms=START_NS // 10**6, duration_seconds=0.1, exposition=None))


def sender(writer: Writer) -> ScrapeSender:
    return ScrapeSender(
        writer=writer, receiver="http://receiver", check=Check(), samples_per_request=2000
    )


async def test_what_waits_when_the_process_ends_is_still_sent() -> None:
    writer = HeldWriter()
    sending = sender(writer)
    for _ in range(3):
        sending.add(a_scrape(), size_bytes=10)
    assert sending.waiting_bytes == 30

    ending = asyncio.ensure_future(sending.end())
    writer.may.set()
    await ending

    assert (writer.written, sending.waiting_bytes) == (3, 0)


async def test_what_cannot_be_sent_when_the_process_ends_is_said() -> None:
    sending = sender(HeldWriter())
    for _ in range(3):
        sending.add(a_scrape(), size_bytes=10)

    with capture_logs() as logs:
        await sending.end()

    assert [(line["event"], line["count"], line["samples"]) for line in logs] == [
        ("scrapes_discarded", 3, 15)
    ]


@pytest.mark.parametrize(
    ("url", "instance"),
    [
        ("http://host:9100/metrics", "host:9100"),
        ("http://host/metrics", "host:80"),
        ("https://u:p@host/metrics", "host:443"),
        ("http://[::1]:9100/metrics", "[::1]:9100"),
    ],
)
def test_the_instance_is_host_and_port(url: str, instance: str) -> None:
    assert instance_of(url) == instance


async def test_credentials_that_cannot_be_read_are_a_mistake_of_the_settings() -> None:
    page = OpenMetricsSettings(url="http://localhost:9100/metrics", ca_file="/no/such/file")

    with pytest.raises(SettingsError, match=r"remote_write\.openmetrics\.ca_file"):
        await run_scraping(RemoteWriteSettings(openmetrics=page), Readiness())
