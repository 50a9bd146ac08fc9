"""The demo over a real broker and with real receivers, as a user starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.settings import KafkaSettings
from gpuledger.topics import Topics
from tests.default_topics import SAMPLES, TOPICS
from tests.real.changed_topics import delete
from tests.real.services.kcat import KcatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

NODES = 2
FEW_EVENTS = 4
"""Two nodes, one tick per second."""
COMMAND = [str(Path(sys.executable).parent / "gpuledger"), "demo", "--source", "simulated"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("GPULEDGER")
}


def run_demo(broker: Kafka, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    bus = ("--bus", f"kafka://{broker.bootstrap_servers}", "--for", "5s", "--format", "json")
    return subprocess.run(
        [*COMMAND, *bus, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def topics_on(broker: Kafka, kcat: Kcat) -> set[str]:
    """Return the topics of all demos on the broker."""
    there = kcat.metadata(broker.bootstrap_servers)["topics"]
    return {found["topic"] for found in there if found["topic"].startswith("gpuledger-demo-")}


def test_a_run_has_its_own_topics_and_deletes_them(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """A deployment's topics with the default names are left unchanged."""
    broker = start_kafka()
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    asyncio.run(create_topics(settings, [SAMPLES]))
    kcat.produce(broker.bootstrap_servers, SAMPLES.name, b"somebody's")
    ran = run_demo(broker, "--store", tmp_path)
    assert ran.returncode == 0, ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["events"] == summary["samples"] > 0
    assert summary["conservation_error_max_ratio"] == 0.0
    assert summary["store"]["rows"] >= summary["entries"]
    assert {pod["pod"] for pod in summary["pods"]} >= {"embeddings-0"}
    assert re.fullmatch(
        rf"creating {len(TOPICS)} topics gpuledger-demo-\w{{8}}\.… on \S+\n", ran.stderr
    )
    assert topics_on(broker, kcat) == set()
    kept = kcat.consume(broker.bootstrap_servers, SAMPLES.name)
    assert [one.value for one in kept] == [b"somebody's"]


@contextlib.contextmanager
def started_demo(broker: Kafka, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a running demo; it is killed if it has not ended."""
    bus = ("--bus", f"kafka://{broker.bootstrap_servers}")
    running = subprocess.Popen(
        [*COMMAND, *bus, *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def test_ctrl_c_ends_the_demo_cleanly_with_the_summary(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """Also on a broker."""
    broker = start_kafka()
    arguments = ("--for", "60s", "--format", "json", "--store", tmp_path)
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0, err
    assert json.loads(out)["events"] > 0
    assert topics_on(broker, kcat) == set()


@pytest.mark.parametrize("number", [pytest.param(None, marks=pytest.mark.extended), signal.SIGINT])
def test_a_broker_that_dies_does_not_delay_the_end_or_suppress_the_summary(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path, number: signal.Signals | None
) -> None:
    """By `--for` or Ctrl-C: it prints what was booked until then, and that Kafka was unavailable.

    The topics cannot be deleted then, and a line names them.
    """
    broker = start_kafka()
    arguments = ("--store", tmp_path / "store", "--for", "600s" if number else "60s")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        broker.kill()
        if number:
            time.sleep(2)
            running.send_signal(number)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert re.search(r"cannot delete the topics gpuledger-demo-\w{8}\.… on", err)
    assert f"Kafka at {broker.bootstrap_servers} was unavailable at the end" in out
    assert "serving/embeddings-0" in out
    assert re.search(r"^Totals: an unknown number of samples, [1-9]\d* events", out, re.MULTILINE)


@pytest.mark.extended
def test_a_topic_that_is_deleted_is_named_and_kafka_is_not_reported_as_unavailable(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    broker = start_kafka()
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    arguments = ("--store", tmp_path / "store", "--format", "json", "--for", "20s")
    with started_demo(broker, *arguments) as running:
        (events,) = wait_for_events(broker, kcat)
        samples = Topics(events.removesuffix(".events.v1")).samples
        asyncio.run(delete(settings, samples))
        out, err = running.communicate(timeout=120)
    assert running.returncode == 1, err
    summary = json.loads(out)
    assert summary["missing_topics"] == [samples.name]
    assert "bus_away" not in summary


@pytest.mark.extended
def test_each_event_counts_once_even_if_the_groups_have_removed_the_run_in_the_meantime(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """As after a laptop lid was closed for longer than a session."""
    broker = start_kafka()
    arguments = ("--store", tmp_path / "store", "--format", "json", "--for", "40s")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        time.sleep(5)
        running.send_signal(signal.SIGSTOP)
        time.sleep(15)
        running.send_signal(signal.SIGCONT)
        out, err = running.communicate(timeout=120)
    assert running.returncode == 0, out + err
    summary = json.loads(out)
    assert summary["events"] == summary["samples"] > 0
    assert not any("missing" in sink for sink in summary["sinks"])


@pytest.mark.extended
def test_two_concurrent_runs_do_not_see_each_other(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    broker = start_kafka()
    arguments = ("--store", tmp_path / "first", "--for", "15s", "--format", "json")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        second = run_demo(broker, "--store", tmp_path / "second")
        out, err = running.communicate(timeout=120)
    assert (running.returncode, second.returncode) == (0, 0), err + out + second.stderr
    for summary in (json.loads(out), json.loads(second.stdout)):
        assert summary["events"] == summary["samples"] > 0
        assert not any("missing" in sink for sink in summary["sinks"])
    assert topics_on(broker, kcat) == set()


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.extended), (None, 2)],
)
def test_a_start_that_waits_for_silent_brokers_ends_soon(
    start_kafka: Callable[[], Kafka], number: signal.Signals | None, code: int
) -> None:
    """Immediately by Ctrl-C, otherwise after ten seconds: without a limit it took 36."""
    broker = start_kafka()
    broker.process.send(signal.SIGSTOP)
    try:
        with started_demo(broker) as running:
            if number:
                time.sleep(4)
                running.send_signal(number)
            out, err = running.communicate(timeout=8 if number else 60)
    finally:
        broker.process.send(signal.SIGCONT)
    assert running.returncode == code
    assert out == ""
    assert (broker.bootstrap_servers in err) is not bool(number)


@pytest.mark.extended
def test_brokers_that_fall_silent_while_the_groups_form_are_reported_soon_too(
    start_kafka: Callable[[], Kafka],
) -> None:
    """The components themselves would wait for them without an end."""
    broker = start_kafka()
    with started_demo(broker) as running:
        assert running.stderr is not None
        assert "creating" in running.stderr.readline()
        broker.process.send(signal.SIGSTOP)
        try:
            out, err = running.communicate(timeout=120)
        finally:
            broker.process.send(signal.SIGCONT)
    assert running.returncode == 2
    assert out == ""
    assert f"--bus kafka://{broker.bootstrap_servers}" in err


def wait_for_events(broker: Kafka, kcat: Kcat) -> list[str]:
    """Return the events topics once one has a few of each node, however long the start takes."""
    end_seconds = time.monotonic() + 120
    while time.monotonic() < end_seconds:
        with contextlib.suppress(KcatError):
            topics = [name for name in topics_on(broker, kcat) if name.endswith(".events.v1")]
            for topic in topics:
                found = kcat.consume(broker.bootstrap_servers, topic)
                by_node = Counter(message.key for message in found)
                if len(by_node) == NODES and min(by_node.values()) >= FEW_EVENTS:
                    return topics
        time.sleep(0.5)
    raise TimeoutError("too few events")
