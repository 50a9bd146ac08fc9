"""A page sent to real receivers, and Prometheus' own suite for senders of remote-write 2.0."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING

import pytest
from typing_extensions import override

from tests.real.services.ports import free_ports
from tests.real.services.process import Process
from tests.real.sinks.running_sinks import SINK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.real.services.prometheus import PrometheusApi

SUITE_SECONDS = 120.0
CASES = {
    "_setup": "MUST",
    "value": "MUST",
    "timestamp": "MUST",
    "start_timestamp_for_counters": "SHOULD",
    "start_timestamp_for_histograms": "SHOULD",
}
"""What the suite of this version asks, with the level at which it does."""


@pytest.mark.parametrize("protocol", ["", pytest.param("auto", marks=pytest.mark.extended)])
def test_the_public_suite_for_senders_of_2_0_is_passed(
    remote_write_compliance: Path, protocol: str
) -> None:
    done = subprocess.run(
        [remote_write_compliance, "-test.v", f"-test.timeout={SUITE_SECONDS:.0f}s"],
        env={**os.environ, "COMPLIANCE_SINK": str(SINK), "COMPLIANCE_PROTOCOL": protocol},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * SUITE_SECONDS,
    )

    passed = set(re.findall(r"--- PASS: TestSender/\S+/rw2/(\S+) ", done.stdout))
    assert (done.returncode, passed) == (0, set(CASES)), done.stdout + done.stderr
    assert "--- SKIP" not in done.stdout


PAGE = b"""\
# HELP jobs Jobs that were done.
# TYPE jobs counter
jobs_total{job="mine"} 3 # {trace_id="abc"} 1.5
jobs_created{job="mine"} 1700000000
# HELP wait_seconds Time that jobs waited.
# TYPE wait_seconds histogram
wait_seconds_bucket{le="+Inf"} 3
wait_seconds_count 3
wait_seconds_sum 7.5
# EOF
"""


class Page(BaseHTTPRequestHandler):
    """Says the same to whoever asks."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/openmetrics-text; version=1.0.0")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    @override
    def log_message(self, *_: object) -> None:
        """Write nothing beside the tests."""


@contextmanager
def showing() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def scraping(url: str, receiver: str, folder: Path) -> Iterator[Process]:
    """Run `gpuledger-sink remote_write --from-openmetrics URL`."""
    sink = Process(
        name="scraping",
        argv=[SINK, "remote_write", "--from-openmetrics", url],
        folder=folder,
        environment={
            "GPULEDGER_REMOTE_WRITE__URL": receiver,
            "GPULEDGER_HTTP__LISTEN": f"127.0.0.1:{free_ports(1)[0]}",
        },
    )
    sink.start()
    try:
        yield sink
    finally:
        sink.kill()


@pytest.mark.parametrize(
    "start", ["start_prometheus", "start_prometheus_2", "start_victoria_metrics"]
)
def test_a_real_receiver_has_what_a_page_says_and_that_it_is_gone(
    start: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    receiver: PrometheusApi = request.getfixturevalue(start)()
    with showing() as url, scraping(url, receiver.remote_write_url, tmp_path):
        receiver.await_query('up{job="openmetrics"} == 1')
        (found,) = receiver.await_query("jobs_total")
        receiver.await_query('wait_seconds_bucket{le="+Inf"} == 3')
        assert found["value"][1] == "3"
        assert found["metric"]["exported_job"] == "mine"
        assert found["metric"]["instance"] == url.split("/")[2]


def test_series_end_when_the_target_is_gone(
    start_prometheus: Callable[[], PrometheusApi], tmp_path: Path
) -> None:
    receiver = start_prometheus()
    with ExitStack() as page:
        url = page.enter_context(showing())
        with scraping(url, receiver.remote_write_url, tmp_path):
            receiver.await_query("jobs_total")
            page.close()

            # Without a stale marker it would be there for five minutes.
            receiver.await_query("up == 0 unless on () jobs_total")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_signal_ends_it_with_zero(
    number: signal.Signals,
    is_there: bool,  # noqa: FBT001  # a column of the table
    tmp_path: Path,
    start_prometheus: Callable[[], PrometheusApi],
) -> None:
    gone = f"http://127.0.0.1:{free_ports(1)[0]}/api/v1/write"
    receiver = start_prometheus().remote_write_url if is_there else gone
    with showing() as url, scraping(url, receiver, tmp_path) as sink:
        sink.wait_until(
            lambda: b"scraping_started" in sink.log.read_bytes(), deadline_seconds=120.0
        )
        sink.send(number)

        assert sink.wait_exit(deadline_seconds=120.0) == 0
