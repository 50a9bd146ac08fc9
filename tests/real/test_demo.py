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
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import pytest

from gpuledger.bus.administration import create_topics
from gpuledger.bus.kafka import KafkaBus
from gpuledger.bus.protocol import Subscription
from gpuledger.settings import KafkaSettings
from gpuledger.store.query import entries_sql
from gpuledger_enricher.join.join_settings import GROUP as JOIN_GROUP
from tests.default_topics import DEAD_LETTERS, EVENTS, SAMPLES, TOPICS
from tests.real.changed_topics import delete
from tests.real.services.kcat import KcatError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.real.services.kafka import Kafka
    from tests.real.services.kcat import Kcat

FEW_EVENTS = 8
"""Of two nodes, a tick a second."""
COMMAND = [str(Path(sys.executable).parent / "gpuledger"), "demo", "--source", "simulated"]
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith("GPULEDGER")
}


def run_demo(broker: Kafka, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    bus = ("--bus", f"kafka://{broker.bootstrap_servers}", "--for", "5", "--format", "json")
    return subprocess.run(
        [*COMMAND, *bus, *map(str, arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_missing_topics_are_made_and_every_tick_comes_back_as_an_event(
    start_kafka: Callable[[], Kafka], tmp_path: Path
) -> None:
    """Twice: what the first one left is refused, until the second is told to take it."""
    broker = start_kafka()
    for run, more in (("first", []), ("second", ["--reuse-topics"])):
        ran = run_demo(broker, "--store", tmp_path / run, *more)
        assert ran.returncode == 0, ran.stderr
        summary = json.loads(ran.stdout)
        assert summary["events"] == summary["ticks"] > 0, run
        assert summary["conservation_error_max_ratio"] == 0.0
        assert summary["store"]["rows"] >= summary["entries"]
        assert count_boots(tmp_path / run) == 2, "each run has a boot of its own on its two nodes"
        assert {pod["pod"] for pod in summary["pods"]} >= {"embeddings-0"}
        made = f"making {len(TOPICS)} topics on {broker.bootstrap_servers} … done\n"
        assert (made in ran.stderr) is not bool(more)
    refused = run_demo(broker)
    assert refused.returncode == 2
    assert "holds records already" in refused.stderr


def count_boots(store: Path) -> int:
    """Return how many boots the rows of a store are of."""
    with duckdb.connect() as connection:
        sql = f"SELECT count(DISTINCT boot_id) FROM {entries_sql(str(store))}"  # noqa: S608  # of our own parts
        (found,) = connection.execute(sql).fetchall()
    return int(found[0])


def test_a_topic_that_holds_somebody_s_record_is_refused_and_nothing_is_made_or_written(
    start_kafka: Callable[[], Kafka], kcat: Kcat
) -> None:
    """The line names the topic and the remedy."""
    broker, topic = start_kafka(), DEAD_LETTERS.name
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    asyncio.run(create_topics(settings, [DEAD_LETTERS]))
    kcat.produce(broker.bootstrap_servers, topic, b"somebody's")
    refused = run_demo(broker)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    for part in (f"--bus kafka://{broker.bootstrap_servers}", topic, "--reuse-topics"):
        assert part in line
    assert refused.stdout == ""
    there = kcat.metadata(broker.bootstrap_servers)["topics"]
    assert [found["topic"] for found in there] == [topic]
    assert [kept.value for kept in kcat.consume(broker.bootstrap_servers, topic)] == [b"somebody's"]


@pytest.mark.parametrize("is_committed", [True, False])
def test_topics_of_somebody_else_are_refused_with_reuse_topics_too(
    start_kafka: Callable[[], Kafka], kcat: Kcat, *, is_committed: bool
) -> None:
    """Those that another group reads, as the join of a deployment does, and those nobody reads."""
    broker, topic = start_kafka(), SAMPLES.name
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    asyncio.run(create_topics(settings))
    kcat.produce(broker.bootstrap_servers, topic, b"somebody's")
    if is_committed:
        asyncio.run(commit_some(settings, group=JOIN_GROUP, topic=topic))
    refused = run_demo(broker, "--reuse-topics")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    group = JOIN_GROUP if is_committed else "gpuledger-demo-join"
    assert topic in line
    assert f"consumer group {group}" in line
    kept = [
        found.value
        for each in TOPICS
        for found in kcat.consume(broker.bootstrap_servers, each.name)
    ]
    assert kept == [b"somebody's"]


def test_topics_that_a_deployment_waits_on_are_refused_before_their_first_record(
    start_kafka: Callable[[], Kafka],
) -> None:
    """Its join has committed nothing yet, and would take the demo's ticks for real ones."""
    broker = start_kafka()
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)

    async def refuse_beside_a_member() -> subprocess.CompletedProcess[str]:
        await create_topics(settings)
        subscription = Subscription(group=JOIN_GROUP, topics=[SAMPLES.name])
        async with KafkaBus(settings).consumer(subscription) as consumer:
            while not consumer.assignment():
                await consumer.poll(timeout_seconds=0.2, max_records=1)
            return await asyncio.to_thread(run_demo, broker)

    refused = asyncio.run(refuse_beside_a_member())
    assert refused.returncode == 2
    assert f"{SAMPLES.name} is read by the consumer group {JOIN_GROUP}" in refused.stderr


async def commit_some(settings: KafkaSettings, *, group: str, topic: str) -> None:
    """Read as a group does, up to its first commit, and leave."""
    async with KafkaBus(settings).consumer(Subscription(group=group, topics=[topic])) as consumer:
        while not consumer.assignment():
            await consumer.poll(timeout_seconds=0.2, max_records=1)
        await consumer.commit(dict.fromkeys(consumer.assignment(), 0))


@contextlib.contextmanager
def started_demo(broker: Kafka, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Yield one that runs; it is killed where it has not ended by itself."""
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


def test_ctrl_c_ends_it_cleanly_with_the_summary(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """Within ten seconds, on a broker too."""
    broker = start_kafka()
    arguments = ("--for", "60", "--format", "json", "--store", tmp_path)
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=10)
    assert running.returncode == 0, err
    assert json.loads(out)["events"] > 0


@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_a_broker_that_dies_neither_holds_up_the_end_nor_takes_the_summary_along(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path, number: signal.Signals | None
) -> None:
    """By `--for` and by Ctrl-C: what was booked until then is told, and that Kafka was away."""
    broker = start_kafka()
    arguments = ("--store", tmp_path / "store", "--for", "600" if number else "12")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        broker.kill()
        if number:
            time.sleep(2)
            running.send_signal(number)
        out, _ = running.communicate(timeout=30)
    assert running.returncode == 1
    assert f"Kafka at {broker.bootstrap_servers} was away at the end" in out
    assert "serving/embeddings-0" in out
    assert re.search(r"^An unknown number of ticks, [1-9]\d* events", out, re.MULTILINE)


def test_a_topic_that_is_deleted_is_named_and_kafka_is_not_said_to_be_away(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    broker = start_kafka()
    settings = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
    arguments = ("--store", tmp_path / "store", "--format", "json", "--for", "15")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        asyncio.run(delete(settings, SAMPLES))
        out, err = running.communicate(timeout=60)
    assert running.returncode == 1, err
    summary = json.loads(out)
    assert summary["missing_topics"] == [SAMPLES.name]
    assert "bus_away" not in summary


def test_each_event_counts_once_although_the_groups_have_given_the_run_up_meanwhile(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """As after a lid that was closed for longer than a session."""
    broker = start_kafka()
    arguments = ("--store", tmp_path / "store", "--format", "json", "--for", "40")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        time.sleep(5)
        running.send_signal(signal.SIGSTOP)
        time.sleep(15)
        running.send_signal(signal.SIGCONT)
        out, err = running.communicate(timeout=90)
    assert running.returncode == 0, out + err
    summary = json.loads(out)
    assert summary["events"] == summary["ticks"] > 0
    assert not any("missing" in sink for sink in summary["sinks"])


def test_a_run_after_one_whose_broker_fell_silent_books_its_own_ticks_alone(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """The first one could not leave its groups, nor end its transactions."""
    broker = start_kafka()
    with started_demo(broker, "--store", tmp_path / "first") as running:
        wait_for_events(broker, kcat)
        broker.process.send(signal.SIGSTOP)
        try:
            time.sleep(1.5)
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=30)
        finally:
            broker.process.send(signal.SIGCONT)
    assert running.returncode == 1
    ran = run_demo(broker, "--store", tmp_path / "second", "--reuse-topics")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads(ran.stdout)
    assert summary["events"] == summary["ticks"] > 0
    assert summary["store"]["rows"] >= summary["entries"] > 0
    assert count_boots(tmp_path / "second") == 2


def test_two_runs_at_once_on_the_same_topics_are_refused(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """Each would count the other's ticks; the first one goes on."""
    broker = start_kafka()
    arguments = ("--store", tmp_path / "first", "--format", "json")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        refused = run_demo(broker, "--store", tmp_path / "second", "--reuse-topics")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
    assert refused.returncode == 2
    assert "another demo reads these topics" in refused.stderr
    assert running.returncode == 0, err + out
    first = json.loads(out)
    assert first["events"] == first["ticks"] > 0


def test_a_second_run_neither_disturbs_the_first_nor_books_its_ticks(
    start_kafka: Callable[[], Kafka], kcat: Kcat, tmp_path: Path
) -> None:
    """The first one ends while the second waits for it."""
    broker = start_kafka()
    arguments = ("--store", tmp_path / "first", "--for", "9", "--format", "json")
    with started_demo(broker, *arguments) as running:
        wait_for_events(broker, kcat)
        second = run_demo(broker, "--store", tmp_path / "second", "--reuse-topics")
        out, err = running.communicate(timeout=30)
    assert (running.returncode, second.returncode) == (0, 0), err + out + second.stderr
    first, own = json.loads(out), json.loads(second.stdout)
    for summary in (first, own):
        assert summary["events"] == summary["ticks"] > 0
        assert not any("missing" in sink for sink in summary["sinks"])
    assert count_boots(tmp_path / "second") == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (None, 2)])
def test_a_start_that_waits_for_silent_brokers_ends_soon(
    start_kafka: Callable[[], Kafka], number: signal.Signals | None, code: int
) -> None:
    """At once by Ctrl-C, else after ten seconds: without either it took 36."""
    broker = start_kafka()
    broker.process.send(signal.SIGSTOP)
    try:
        with started_demo(broker) as running:
            if number:
                time.sleep(4)
                running.send_signal(number)
            out, err = running.communicate(timeout=8 if number else 24)
    finally:
        broker.process.send(signal.SIGCONT)
    assert running.returncode == code
    assert out == ""
    assert (broker.bootstrap_servers in err) is not bool(number)


def test_brokers_that_fall_silent_while_the_groups_form_are_said_soon_too(
    start_kafka: Callable[[], Kafka],
) -> None:
    """The stages themselves would wait for them without an end."""
    broker = start_kafka()
    with started_demo(broker) as running:
        assert running.stderr is not None
        assert "making" in running.stderr.readline()
        broker.process.send(signal.SIGSTOP)
        try:
            out, err = running.communicate(timeout=30)
        finally:
            broker.process.send(signal.SIGCONT)
    assert running.returncode == 2
    assert out == ""
    assert f"--bus kafka://{broker.bootstrap_servers}" in err


def wait_for_events(broker: Kafka, kcat: Kcat) -> None:
    """Wait until there are a few events of each node, however long the start takes."""
    end_seconds = time.monotonic() + 45
    while time.monotonic() < end_seconds:
        with contextlib.suppress(KcatError):
            if len(kcat.consume(broker.bootstrap_servers, EVENTS.name)) >= FEW_EVENTS:
                return
        time.sleep(0.5)
    raise TimeoutError("too few events came")
