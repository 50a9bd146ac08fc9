"""Values that a newer version has added to an enumeration: every reader passes them on unchanged.

No reader rejects the record, omits its amounts, or counts them for another value.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest
from msgspec.structs import replace

from gpuledger.codec import decoder_of, encode
from gpuledger.ledger.quantities import imbalances
from gpuledger.records import (
    AttributedIncident,
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuEvent,
    IdleDrawSource,
    MemoryMethod,
    NodeSample,
    PodState,
    ProcessChange,
    ProcessKind,
    ProcessRecord,
    Severity,
)
from gpuledger.store.query import entries_sql
from gpuledger_cli.demo.screen import rows_of as screen_rows_of
from gpuledger_cli.demo.totals import Tally
from gpuledger_enricher.join.booking.books import book_tick
from gpuledger_enricher.join.replay_diff import Agreement, compare_events
from gpuledger_sinks.alerts.incident_words import annotations_of, labels_of
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.wire import Version
from gpuledger_sinks.rows import encoded_rows_of
from tests.default_topics import ATTRIBUTED_INCIDENTS, EVENTS, PROCESSES, SAMPLES
from tests.unit.enricher.join.ticks import process, sample
from tests.unit.enricher.join.ticks import reading as read_in_tick
from tests.unit.sinks.alerts.alerting import incident
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    books,
    container,
    entry,
    event,
    pod,
    reading,
)
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.oracle import parse
from tests.unit.sinks.store.storing import fill

LEASE = Category("lease")
METHODS = {
    "busy_method": BusyMethod("guessed"),
    "memory_method": MemoryMethod("modelled"),
    "energy_method": EnergyMethod("estimated"),
}
EVICTED = PodState("evicted")
POD_NS, HOST_NS, IDLE_NS = 300_000_000, 100_000_000, 350_000_000
LEASE_NS = 250_000_000
BOOKED = {"pod": POD_NS, "host": HOST_NS, "lease": LEASE_NS, "idle": IDLE_NS}


def taken(busy_ns: int, category: Category, **more: Any) -> Entry:  # noqa: ANN401  # a record's fields
    return entry(category, busy_ns=busy_ns, memory_bytes=4 * 2**30, **more)


def of_tomorrow() -> GpuEvent:
    """Return an event as a newer join may write it, as decoded by this version."""
    place = container(pod_uid="uid-train", container_id="c" * 64)
    booked = [
        taken(POD_NS, Category.POD),
        taken(HOST_NS, Category.HOST),
        # The category may have a container, as a pod's has, or refer to nothing that is known here.
        taken(200_000_000, LEASE, container=place),
        taken(50_000_000, LEASE),
        taken(IDLE_NS, Category.IDLE),
    ]
    own = books(reading(), *booked, idle_draw_source=IdleDrawSource("asked"), **METHODS)
    written = encode(event(gpus=[own], pods=[pod(state=EVICTED)]))
    read: GpuEvent = decoder_of(EVENTS.name, GpuEvent).decode(written)
    return read


def decoded(one: GpuEvent, _: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for each in one.gpus[0].entries:
        found[each.category.value] += each.busy_ns or 0
    return found


def in_rows(one: GpuEvent, _: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in map(orjson.loads, encoded_rows_of(one, ingested_time_ns=START_NS)):
        found[row["category"]] += row["busy_ns"]
    return found


def in_the_store(one: GpuEvent, folder: Path) -> Counter[str]:
    fill(folder, [one])
    sql = f"SELECT category, sum(busy_ns)::BIGINT FROM {entries_sql(str(folder))} GROUP BY 1"  # noqa: S608  # the store's own relation
    with duckdb.connect() as connection:
        return Counter(dict(connection.execute(sql).fetchall()))


def in_remote_write(one: GpuEvent, _: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for series in parse(ActiveSeries().encode(samples_of(one)).encode(Version.V1)):
        of, is_busy, _rest = series.name.partition("_gpu_busy_ratio")
        if is_busy:
            category = series.label("category") or of.rpartition("_")[2]
            found[category] += round(series.value * SECOND_NS)
    return found


def on_the_demos_screen(one: GpuEvent, _: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in screen_rows_of(one):
        # A pod's row starts with its name, or with its state.
        category = row.pod.strip("_") if row.pod.startswith("__") else "pod"
        found[category] += int(row.sm) * SECOND_NS // 100
    return found


READERS: dict[str, Callable[[GpuEvent, Path], Counter[str]]] = {
    "decoder": decoded,
    "rows": in_rows,
    "store": in_the_store,
    "remote-write": in_remote_write,
    "the demo's screen": on_the_demos_screen,
}


@pytest.mark.parametrize("reader", READERS)
def test_an_unknown_category_keeps_its_amounts_and_no_other_category_gets_them(
    reader: str, tmp_path: Path
) -> None:
    assert READERS[reader](of_tomorrow(), tmp_path) == BOOKED


def test_the_demo_sums_an_unknown_category_separately_and_shows_it_at_the_end() -> None:
    tally = Tally()
    tally.add(of_tomorrow())

    assert sum(total.busy_ns for total in tally.pods.values()) == POD_NS
    assert (tally.without_pod_ns, tally.other_ns) == (HOST_NS, {"lease": LEASE_NS})


def test_a_tick_with_an_unknown_category_balances() -> None:
    (own,) = of_tomorrow().gpus

    assert "busy_ns" not in {off.quantity for off in imbalances([own], SECOND_NS)}


def words_in_rows(one: GpuEvent) -> set[str]:
    return {
        str(value)
        for row in encoded_rows_of(one, ingested_time_ns=START_NS)
        for value in orjson.loads(row).values()
    }


def words_on_the_screen(one: GpuEvent) -> set[str]:
    rows = list(screen_rows_of(one))
    return {row.method for row in rows} | {word for row in rows for word in row.pod.split()}


def words_in_remote_write(one: GpuEvent) -> set[str]:
    series = parse(ActiveSeries().encode(samples_of(one)).encode(Version.V1))
    return {value for found in series for _, value in found.labels}


def words_written_again(one: GpuEvent) -> set[str]:
    return {word for word in encode(one).decode().replace(",", '"').split('"') if word}


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (words_in_rows, {"guessed", "modelled", "estimated", "evicted", "train-0"}),
        (words_on_the_screen, {"guessed", "evicted"}),
        (words_in_remote_write, {"guessed", "train-0"}),
        (words_written_again, {"guessed", "modelled", "estimated", "asked", "evicted"}),
    ],
)
def test_unknown_methods_and_states_are_shown_unchanged(
    reader: Callable[[GpuEvent], set[str]], words: set[str]
) -> None:
    assert words <= reader(of_tomorrow())


@pytest.mark.parametrize(
    ("then", "now", "agreement"),
    [
        (EVICTED, EVICTED, Agreement.EQUAL),
        (EVICTED, PodState.KNOWN, Agreement.MORE_COMPLETE),
        (PodState.KNOWN, EVICTED, Agreement.DIFFERENT),
        (EVICTED, PodState.PENDING, Agreement.DIFFERENT),
        (PodState.FOREIGN, EVICTED, Agreement.DIFFERENT),
    ],
)
def test_a_replay_does_not_treat_an_unknown_state_as_another_one(
    then: PodState, now: PodState, agreement: Agreement
) -> None:
    first, replayed = (encode(event(pods=[pod(state=state)])) for state in (then, now))

    assert compare_events(first, replayed).agreement is agreement


def test_a_replay_names_the_unknown_category_and_method_that_differ() -> None:
    (own,) = (one := of_tomorrow()).gpus
    entries = [replace(each, category=Category.HOST) for each in own.entries]
    other = replace(own, entries=entries, busy_method=BusyMethod.EXCLUSIVE)

    changes = compare_events(encode(one), encode(replace(one, gpus=[other]))).changes
    reported = {(change.first, change.replayed) for change in changes}
    assert {("lease", "host"), ("guessed", "exclusive")} <= reported


def test_an_alert_with_an_unknown_severity_and_pod_state_is_sent_unchanged() -> None:
    reported = incident(START_NS)
    fatal = replace(reported.incident, severity=Severity("fatal"))
    written = encode(AttributedIncident(incident=fatal, pods=[pod(state=EVICTED)]))
    attributed = decoder_of(ATTRIBUTED_INCIDENTS.name, AttributedIncident).decode(written)

    assert labels_of(attributed)["severity"] == "fatal"
    assert "research/train-0" in str(annotations_of(attributed))


def ticks() -> tuple[NodeSample, NodeSample]:
    """Return a tick as a newer agent may write it, and the same with this version's values."""
    allocated = {
        "gpu_uuid": "GPU-a", "device_id": "lease-7", "namespace": "research", "pod": "train-0",
        "container": "trainer",
    }  # fmt: skip
    words = [
        ("video", "estimated", "example.com/leased-gpu"),
        ("compute", "counter", "nvidia.com/gpu"),
    ]
    one, other = (
        decoder_of(SAMPLES.name, NodeSample).decode(
            encode(
                sample(
                    gpus=[read_in_tick(energy_method=EnergyMethod(method))],
                    processes=[process(kind=ProcessKind(kind))],
                    allocations=[{**allocated, "resource_name": resource}],
                )
            )
        )
        for kind, method, resource in words
    )
    return one, other


def test_a_tick_with_unknown_processes_methods_and_resources_is_booked_like_any_other() -> None:
    of_tomorrow_, of_today = ticks()
    (unknown,), (known,) = book_tick(of_tomorrow_), book_tick(of_today)

    assert unknown.entries == known.entries
    assert "estimated" in {unknown.energy_method, unknown.reading.energy_method}
    assert sum(each.allocated_ns or 0 for each in unknown.entries) == SECOND_NS
    assert decoder_of(SAMPLES.name, NodeSample).decode(encode(of_tomorrow_)) == of_tomorrow_
    assert of_tomorrow_.allocations[0].resource_name == "example.com/leased-gpu"


def test_a_process_record_of_an_unknown_change_is_decoded() -> None:
    written = encode(
        ProcessRecord(
            cluster="default",
            node="node-a",
            boot_id="boot-1",
            time_ns=START_NS,
            change=ProcessChange("suspended"),
            pid=7,
            gpu_uuids=[],
        )
    )
    assert decoder_of(PROCESSES.name, ProcessRecord).decode(written).change == "suspended"


def test_books_keep_the_source_of_the_idle_draw() -> None:
    (own,) = of_tomorrow().gpus
    assert isinstance(own, GpuBooks)
    assert own.idle_draw_source == "asked"
