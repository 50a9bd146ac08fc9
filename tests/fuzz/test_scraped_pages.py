"""Pages that are scraped: whatever they say, they are no exposition or one that can be sent."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger_sinks.remote_write.openmetrics.exposition import (
    OPENMETRICS,
    TEXT,
    NoExpositionError,
    parse_exposition,
)
from gpuledger_sinks.remote_write.openmetrics.scraped_series import (
    Scrape,
    ScrapedSeries,
    TimeLimits,
)
from gpuledger_sinks.remote_write.wire import Version
from tests.fuzz.mutations import changed_bytes
from tests.unit.sinks.remote_write.oracle import parse, parse_v2

START_MS = 1_790_000_000_000
PAGES = [
    b"""\
# HELP jobs Jobs that were \\"done\\".
# TYPE jobs counter
jobs_total{job="a",le="\\\\"} 3 # {trace_id="abc"} 1.5 1700000001.25
jobs_created{job="a",le="\\\\"} 1700000000.5
# TYPE wait_seconds histogram
# UNIT wait_seconds seconds
wait_seconds_bucket{le="1.0"} 2 # {} 0.5
wait_seconds_bucket{le="+Inf"} 3
wait_seconds_count 3
wait_seconds_sum 7.5
# TYPE native histogram
native {count:24,sum:100,schema:0,zero_threshold:0.001,zero_count:4,positive_spans:[0:2,1:2],\
positive_deltas:[2,1,-3,3]}
# TYPE of summary
of{quantile="0.5"} NaN 1790000000
# TYPE state stateset
state{state="a"} 1
# EOF
""",
    b"# HELP a A.\n# TYPE a counter\na 1 1790000000000\nb{job=\"x\"} +Inf\n\nup{a=''} -1e-3\n",
]


@pytest.mark.parametrize("content_type", [OPENMETRICS, TEXT])
@given(pages=st.lists(changed_bytes(PAGES), min_size=1, max_size=3))
def test_what_is_scraped_is_refused_or_sent(content_type: str, pages: list[bytes]) -> None:
    series = ScrapedSeries(
        job="test",
        instance="host:80",
        external_labels={"site": "a"},
        limits=TimeLimits(max_ahead_ms=300_000, max_age_ms=None),
    )
    for second, page in enumerate(pages):
        exposition = None
        with suppress(NoExpositionError):
            exposition = parse_exposition(page, content_type=content_type, max_samples=1000)
        time_ms = START_MS + 1000 * second
        scrape = series.add(Scrape(time_ms=time_ms, duration_seconds=1, exposition=exposition))
        for request in scrape.requests(10):
            sent = parse(request.encode(Version.V1))
            in_2_0 = [one.series for one in parse_v2(request.encode(Version.V2))]
            assert [one.labels for one in sent] == [one.labels for one in in_2_0]
            for one in sent:
                names = [name for name, _ in one.labels]
                assert names == sorted(set(names))
                assert all(value for _, value in one.labels)
                assert one.time_ms > 0
