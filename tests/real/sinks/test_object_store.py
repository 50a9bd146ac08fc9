"""A store on an S3 server: two writers, a killed writer, maintenance, and readers."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from gpuledger_cli.__main__ import main
from gpuledger_sinks.store.table import StaleTableError, UsageTable
from tests.real.services.object_store import BUCKET, SECRET_KEY
from tests.real.sinks.running_sinks import NODES, make_topics, publish, ticks
from tests.unit.sinks.builders import SECOND_NS
from tests.unit.sinks.store.test_rollups import row

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.real.services.kafka import Kafka
    from tests.real.services.object_store import ObjectStore
    from tests.real.sinks.running_sinks import Sink

STORE = f"s3://{BUCKET}/gpuledger"
COMMITS = 20
KILLS = 4


@pytest.fixture
def gateway(
    start_object_store: Callable[[], ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> ObjectStore:
    """Return a gateway whose credentials are in the environment."""
    part = start_object_store()
    for name, value in part.options.items():
        monkeypatch.setenv(name.upper(), value)
    return part


def run_query(capsys: pytest.CaptureFixture[str], sql: str) -> list[dict[str, str]]:
    assert main(["query", "--store", STORE, sql, "--format", "json"]) == 0
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("gateway")
def test_concurrent_commits_of_writers_are_neither_lost_nor_applied_twice() -> None:
    """The server stores a commit only if its number is free: a conditional put."""
    UsageTable(store_uri=STORE).load([])

    def write(stream: str, node: str) -> None:
        table = UsageTable(store_uri=STORE)
        while (offset := table.load([stream]).get(stream, -1) + 1) < COMMITS:
            try:
                table.append([row(0, 1, offset=offset, node=node)], {stream: offset}, time_ms=1)
            except StaleTableError:
                continue

    # Two writers of one stream, whose offsets must be there once, and a writer of another.
    works = [("shared", "a"), ("shared", "b"), ("own", "c")]
    threads = [threading.Thread(target=write, args=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = DeltaTable(f"{STORE}/usage")
    assert sum(table.get_add_actions(flatten=True)["num_records"].to_pylist()) == 2 * COMMITS
    assert table.version() == 2 * COMMITS


async def test_a_sink_that_is_killed_during_a_commit_loses_and_repeats_nothing(
    broker: Kafka,
    gateway: ObjectStore,
    start_sink: Callable[..., Sink],
    capsys: pytest.CaptureFixture[str],
) -> None:
    await make_topics(broker)
    settings = {"store__uri": STORE, "store__flush_seconds": "0.05", "store__max_poll_records": "7"}
    sink = start_sink("store", broker, **settings)
    for number in range(KILLS):
        before = gateway.count("PUT", "/usage/")
        await publish(broker, ticks(12, first=number * 12))
        # Data and commit are two requests; after the first the sink is between them.
        awaited = before + 1 + number % 2
        sink.wait_until(lambda n=awaited: gateway.count("PUT", "/usage/") >= n, deadline_seconds=99)  # type: ignore[misc]  # the number is bound here
        sink.kill()
        sink.start()
    every = 12 * KILLS
    await publish(broker, ticks(1, first=every))
    sql = "SELECT node, sum(sample_count) AS ticks, sum(busy_ns) AS busy FROM usage GROUP BY ALL"

    def is_there() -> bool:
        found = run_query(capsys, sql)
        return sum(int(each["ticks"]) for each in found) >= (every + 1) * len(NODES)

    sink.wait_until(is_there, deadline_seconds=120)
    found = {
        each["node"]: (int(each["ticks"]), int(each["busy"])) for each in run_query(capsys, sql)
    }
    assert found == dict.fromkeys(NODES, (every + 1, (every + 1) * SECOND_NS // 2))
    assert sink.stop(deadline_seconds=120) == 0
    assert SECRET_KEY not in sink.log.read_text()


def test_the_polars_example_of_the_page_runs_unchanged(
    gateway: ObjectStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = UsageTable(store_uri=STORE)
    table.load([])
    table.append([row(0, 36 * 10**11, offset=0)], {"s": 0}, time_ms=1)
    secret = tmp_path / "secret"
    secret.write_text(SECRET_KEY)
    options = {**gateway.options, "aws_secret_access_key_file": str(secret)}
    del options["aws_secret_access_key"]
    given = [f"--storage-option={name}={value}" for name, value in options.items()]
    assert main(["store", "maintain", "--store", STORE, "--usage-retention=0d", *given]) == 0
    page = (Path(__file__).parents[3] / "docs" / "guides" / "store.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (example,) = [each for each in examples if "polars" in each]
    capsys.readouterr()
    exec(compile(example, "store.md", "exec"), {})  # noqa: S102  # our own page
    assert "1.0" in capsys.readouterr().out


def test_maintenance_and_readers_take_credentials_from_the_environment_and_never_show_them(
    gateway: ObjectStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = UsageTable(store_uri=STORE)
    table.load([])
    for number in range(9):
        table.append([row(number, 1, offset=number)], {"s": number}, time_ms=1)
    forever = ["--usage-retention", "0d", "--usage-hourly-retention", "0d"]
    assert main(["store", "maintain", "--store", STORE, *forever]) == 0
    shown = capsys.readouterr()
    assert "9 files" in shown.out
    assert run_query(capsys, "SELECT node, busy_ns FROM usage_hourly") == [
        {"node": "node-a", "busy_ns": 9}
    ]
    assert main(["bill", "--store", STORE, "--period", "2024-10", "--format", "json"]) in {0, 3}
    shown_bill = capsys.readouterr()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    for command in (["store", "maintain"], ["query", "SELECT 1"], ["bill"]):
        assert main([*command, "--store", STORE]) == 2
        refused = capsys.readouterr().err
        assert refused.count("\n") == 1
        assert "403 Forbidden" in refused
        assert "another-secret" not in refused
    assert SECRET_KEY not in f"{shown}{shown_bill}{gateway.log.read_text()}"
