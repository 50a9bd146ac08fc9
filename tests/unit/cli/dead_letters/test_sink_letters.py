"""Letters of a sink reach its receiver again, and nobody else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from msgspec import json
from typing_extensions import override

from gpuledger.bus.protocol import Message
from gpuledger.errors import UnavailableError, UserError
from gpuledger.ledger.families import INCIDENTS
from gpuledger.ledger.rows import EntryRow
from gpuledger.ledger.usage import COUNTERS
from gpuledger.runtime import Readiness
from gpuledger.store.commits import describe, valid_through_us
from gpuledger.store.query import count_rows
from gpuledger_cli.dead_letters.dead_letters_command import scan
from gpuledger_cli.dead_letters.letter_log import LetterFilter, Position
from gpuledger_cli.dead_letters.letter_printing import LetterPrinter
from gpuledger_cli.dead_letters.letter_replay import exit_code
from gpuledger_cli.dead_letters.letter_target import replayed_kind
from gpuledger_sinks.loop import run_sink
from gpuledger_sinks.registry import KINDS, REMOTE_WRITE, ROWS, STORE, SinkKind
from gpuledger_sinks.settings import (
    RemoteWriteSettings,
    RowsSettings,
    StoreSettings,
    TenantSettings,
)
from gpuledger_sinks.store.table import UsageTable
from tests.default_topics import DEAD_LETTERS, TOPICS
from tests.default_topics import ROWS as ROWS_TOPIC
from tests.errors import has_words
from tests.unit.cli.dead_letters.builders import (
    JOIN,
    counted,
    record_of,
    reject,
    replay,
    sink_target,
)
from tests.unit.sinks.builders import (
    NODE,
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    committed,
    dead_letters,
    event,
    eventually,
    place_of,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Receiver, receiving
from tests.unit.sinks.remote_write.oracle import parse_compressed
from tests.unit.sinks.store.storing import offsets
from tests.unit.sinks.store.test_rollups import row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gpuledger.bus.memory import MemoryBus
    from gpuledger_cli.dead_letters.letter_replay import LetterOutcome

TENANTS = TenantSettings(of_namespace="team-{namespace}", shared="gpus")
TOO_LONG = Answer(400, "label too long", {"Content-Type": "text/plain"})


async def to_receiver(
    on: MemoryBus,
    receiver: Receiver,
    *,
    clock: ManualClock | None = None,
    sent: Mapping[str, Any] | None = None,
    **options: Any,  # noqa: ANN401  # a filter's
) -> LetterOutcome:
    """Replay to a receiver; `sent` are settings of what is sent there."""
    clock = clock or ManualClock()
    settings = RemoteWriteSettings(url=f"{receiver.url}/write", protocol="1.0", **sent or {})
    target = sink_target(on, REMOTE_WRITE, settings, clock=clock)
    return await replay(on, target, clock=clock, **options)


def contents(on: MemoryBus) -> dict[str, int]:
    """Return how many records each topic has."""
    return {topic.name: len(on.kept(topic.name)) for topic in TOPICS}


def refuse_samples(body: bytes) -> Answer:
    """Answer as a receiver that takes a request without samples alone."""
    return TOO_LONG if parse_compressed(body) else Answer(204)


async def test_what_a_receiver_refused_reaches_it_and_no_topic_of_other_sinks() -> None:
    on = bus()
    await publish(on, event(0), event(1))
    async with receiving(by_body=refuse_samples) as receiver:
        settings = RemoteWriteSettings(
            url=f"{receiver.url}/write", interval_seconds=0, protocol="1.0"
        )
        sink = run_sink(
            REMOTE_WRITE, bus=on, settings=settings, readiness=Readiness(), clock=ManualClock()
        )
        async with running(sink):
            await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(NODE)) == 2)
        before = contents(on)
        assert before[DEAD_LETTERS.name] == 2
        receiver.by_body = lambda _body: Answer(204)
        receiver.received.clear()

        outcome = await to_receiver(on, receiver)

    assert counted(outcome) == (2, 0, 0, 0)
    assert exit_code(outcome) == 0
    assert len(receiver.received) == 2
    assert contents(on) == before | {DEAD_LETTERS.name: 4}
    assert committed(on, REMOTE_WRITE.group, place_of(NODE)) == 2


@pytest.mark.parametrize("tenants", [TenantSettings(), TENANTS])
async def test_what_is_replayed_has_the_series_that_the_sink_would_have_sent(
    tenants: TenantSettings,
) -> None:
    on = bus()
    sent: dict[str, Any] = {"pod_labels": ["team"], "dcgm_names": True, "tenants": tenants}
    await reject(on, record_of(event(0)))
    async with receiving() as receiver:
        await to_receiver(on, receiver, sent=sent)
        replayed = [one for got in receiver.received for one in parse_compressed(got.body)]
        of_tenants = {got.headers.get("X-Scope-OrgID") for got in receiver.received}
    async with receiving() as receiver:
        settings = RemoteWriteSettings(
            url=f"{receiver.url}/write", interval_seconds=0, protocol="1.0", **sent
        )
        await publish(on, event(0))
        sink = run_sink(
            REMOTE_WRITE, bus=on, settings=settings, readiness=Readiness(), clock=ManualClock()
        )
        async with running(sink):
            await eventually(lambda: committed(on, REMOTE_WRITE.group, place_of(NODE)) == 1)
        at_once = [one for got in receiver.received for one in parse_compressed(got.body)]

    # What is counted has gone on since, and lacks nothing.
    of_use = {metric.name for metric in (*COUNTERS.metrics, *INCIDENTS.metrics)}
    assert sorted(replayed) == sorted(one for one in at_once if one.name not in of_use)
    assert of_tenants == ({None} if not tenants.of_namespace else {"team-research", "gpus"})


async def test_what_was_replayed_is_left_out_the_next_time_unless_asked_for() -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(1)))
    async with receiving() as receiver:
        first = await to_receiver(on, receiver, positions=frozenset({Position(0, 1)}))
        second = await to_receiver(on, receiver)
        third = await to_receiver(on, receiver)
        again = await to_receiver(on, receiver, again=True)

    assert [counted(one) for one in (first, second, third, again)] == [
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (0, 0, 0, 2),
        (2, 0, 0, 0),
    ]
    assert len(receiver.received) == 4
    assert exit_code(third) == 0


async def test_a_list_shows_what_was_replayed_and_leaves_it_out_where_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(1)))
    async with receiving() as receiver:
        await to_receiver(on, receiver, positions=frozenset({Position(0, 0)}))
    capsys.readouterr()
    for pending in (False, True):
        printer = LetterPrinter(format="json", limit=0)
        await scan(on, LetterFilter(), pending=pending, into=printer)
    found = [json.decode(line) for line in capsys.readouterr().out.splitlines()]

    assert [(one["position"], one["is_replayed"]) for one in found] == [
        ("0:0", True),
        ("0:1", False),
        ("0:1", False),
    ]


async def test_what_is_refused_again_is_told_in_the_receivers_words_and_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, *(record_of(event(tick)) for tick in range(3)))
    answers = [Answer(204), TOO_LONG, Answer(204), TOO_LONG, Answer(204)]
    async with receiving(*answers) as receiver:
        outcome = await to_receiver(on, receiver)
        letters = await dead_letters(on)
        rest = await to_receiver(on, receiver)

    assert counted(outcome) == (2, 1, 0, 0)
    assert exit_code(outcome) == 1
    assert "0:1 refused again: 400 label too long\n" in capsys.readouterr().out
    # The letters and the marks of two of them: nothing was put aside again.
    assert [letter.reason for letter in letters] == ["rejected"] * 3 + ["replayed"] * 2
    assert counted(rest) == (1, 0, 0, 2)


async def test_a_rehearsal_counts_and_sends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(b"no event", offset=1))
    async with receiving() as receiver:
        outcome = await to_receiver(on, receiver, is_rehearsal=True)

    assert counted(outcome) == (1, 0, 1, 0)
    assert receiver.received == []
    assert len(on.kept(DEAD_LETTERS.name)) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was sent: --yes sends"


async def test_what_cannot_be_put_back_is_left_out_and_told_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    unlike = record_of(event(0))._replace(topic="gpuledger.pods.v1")
    await reject(on, record_of(b"no event"), record_of(None, offset=1), unlike)
    async with receiving() as receiver:
        outcome = await to_receiver(on, receiver)

    assert counted(outcome) == (0, 0, 3, 0)
    assert exit_code(outcome) == 3
    shown = capsys.readouterr().out
    assert "1 left out: it cannot be decoded by this version either: gpuledger.events.v1" in shown
    assert "1 left out: it has no bytes" in shown
    assert "1 left out: it is of a record of gpuledger.pods.v1, which is not read there" in shown


async def test_letters_of_another_consumer_are_passed_over_or_told_where_they_are_named() -> None:
    on = bus()
    await reject(on, record_of(event(0)), consumer=JOIN)
    await reject(on, record_of(event(1)), consumer="my-second-receiver")
    async with receiving() as receiver:
        of_all = await to_receiver(on, receiver)
        named = await to_receiver(on, receiver, positions=frozenset({Position(0, 0)}))
        chosen = await to_receiver(on, receiver, consumers=("my-second-receiver",))
        absent = await to_receiver(on, receiver, positions=frozenset({Position(0, 77)}))

    assert counted(of_all) == (0, 0, 0, 0)
    assert list(named.skipped) == [f"it is of the consumer {JOIN}: name it with --consumer"]
    assert counted(chosen) == (1, 0, 0, 0)
    assert list(absent.skipped) == ["nothing that was asked for lies at 0:77"]


@pytest.mark.parametrize("is_rehearsal", [True, False])
async def test_where_the_group_has_no_letter_it_is_said_which_groups_have_some(
    capsys: pytest.CaptureFixture[str], *, is_rehearsal: bool
) -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(1)), consumer="their-group")
    async with receiving() as receiver:
        outcome = await to_receiver(on, receiver, is_rehearsal=is_rehearsal)

    assert exit_code(outcome) == 0
    *_, why, counts = capsys.readouterr().out.splitlines()
    assert f"group {REMOTE_WRITE.group!r}" in why
    assert "2 belong to other groups: their-group" in why
    assert counts.startswith("0 ")


async def test_a_receiver_that_is_away_is_waited_for_and_then_given_up_with_what_was_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(1)))
    async with receiving(Answer(503), Answer(204), by_body=lambda _: Answer(503)) as receiver:
        with pytest.raises(UnavailableError, match="503"):
            await to_receiver(on, receiver, clock=GivingUpClock())

    assert "1 replayed to http://" in capsys.readouterr().out
    assert [letter.reason for letter in await dead_letters(on)][2:] == ["replayed"]


class GivingUpClock(ManualClock):
    """A clock whose third wait lasts until whoever waits gives up."""

    @override
    async def sleep(self, seconds: float) -> None:
        """Wait for nothing; then let the call after it be the last."""
        await super().sleep(seconds)
        if len(self.slept) > 2:
            raise UnavailableError("503: given up")


async def test_a_replayed_tick_ends_no_series_of_its_node() -> None:
    """One that lies between others, with a pod that they do not have, and the other way round."""
    on = bus()
    await reject(on, record_of(event(0)), record_of(event(5, entries=[], pods=[])))
    async with receiving() as receiver:
        await to_receiver(on, receiver)

    series = [one for request in receiver.received for one in parse_compressed(request.body)]
    assert len(series) > 10
    assert not any(math.isnan(one.value) for one in series)


async def test_a_receiver_of_2_0_that_writes_a_part_has_refused_the_letter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    on, clock = bus(), ManualClock()
    await reject(on, record_of(event(0)))
    some = Answer(204, headers={"X-Prometheus-Remote-Write-Samples-Written": "1"})
    async with receiving(by_body=lambda _: some) as receiver:
        settings = RemoteWriteSettings(url=f"{receiver.url}/write", protocol="2.0")
        target = sink_target(on, REMOTE_WRITE, settings, clock=clock)
        outcome = await replay(on, target, clock=clock)

    assert counted(outcome) == (0, 1, 0, 0)
    assert "written 1 of" in capsys.readouterr().out


async def test_ticks_beyond_the_sinks_own_bounds_are_refused_without_being_sent() -> None:
    on = bus()
    await reject(on, record_of(event(1000)), record_of(event(time_ns=START_NS - 1000 * SECOND_NS)))
    settings = RemoteWriteSettings(url="http://127.0.0.1:9/write", max_age_seconds=300)
    clock = ManualClock()
    outcome = await replay(on, sink_target(on, REMOTE_WRITE, settings, clock=clock), clock=clock)

    assert counted(outcome) == (0, 2, 0, 0)


async def test_rows_are_written_to_the_rows_topic_alone() -> None:
    on, clock = bus(), ManualClock()
    await reject(on, record_of(event(0)), record_of(event(1000)), consumer=ROWS.group)
    before = contents(on)
    outcome = await replay(on, sink_target(on, ROWS, RowsSettings(), clock=clock), clock=clock)

    assert counted(outcome) == (1, 1, 0, 0)  # the second is further ahead than is written
    assert contents(on) == before | {DEAD_LETTERS.name: 3, ROWS_TOPIC.name: 2}
    rows = [json.decode(record.value or b"", type=EntryRow) for record in on.kept(ROWS_TOPIC.name)]
    assert {row.node for row in rows} == {NODE}
    assert [record.partition for record in on.kept(ROWS_TOPIC.name)] == [place_of(NODE)[1]] * 2


async def test_rows_of_the_store_are_appended_beside_those_that_are_there(tmp_path: Path) -> None:
    on, clock = bus(), ManualClock()
    settings = StoreSettings(uri=str(tmp_path), entries=True)
    await reject(on, record_of(event(0), offset=40), record_of(event(1)), consumer=STORE.group)
    for _ in range(2):
        target = sink_target(on, STORE, settings, clock=clock)
        outcome = await replay(on, target, clock=clock, again=True)
        assert counted(outcome) == (2, 0, 0, 0)
    assert clock.slept == []

    # Two rows of each event, however often it is replayed: they are known by their places.
    assert offsets(tmp_path) == [0] * 2 + [40] * 2
    assert count_rows(str(tmp_path), name="usage") == 4


async def test_what_is_complete_of_a_store_is_said_again_with_replayed_rows(
    tmp_path: Path,
) -> None:
    on, clock, uri = bus(), ManualClock(), str(tmp_path)
    table = UsageTable(store_uri=uri)
    table.load(["s"])
    marks = {"0": 7_000_000, "1": 5_000_000}
    commit_info = describe(valid_through=marks)
    table.append([row(1, 1, offset=0)], {"s": 0}, time_ms=1, commit_info=commit_info)
    await reject(on, record_of(event(0)), consumer=STORE.group)
    await replay(on, sink_target(on, STORE, StoreSettings(uri=uri), clock=clock), clock=clock)
    assert count_rows(uri, name="usage") == 3
    assert valid_through_us(DeltaTable(f"{uri}/usage").history(1)) == marks


async def test_a_day_that_is_not_stored_is_refused_and_the_others_are_stored(
    tmp_path: Path,
) -> None:
    on, clock = bus(), ManualClock()
    ten_years_ns = 10 * 366 * 86_400 * SECOND_NS
    await reject(
        on,
        record_of(event(0)),
        record_of(event(time_ns=START_NS - ten_years_ns)),
        consumer=STORE.group,
    )
    target = sink_target(on, STORE, StoreSettings(uri=str(tmp_path), entries=True), clock=clock)
    outcome = await replay(on, target, clock=clock)

    assert counted(outcome) == (1, 1, 0, 0)
    assert offsets(tmp_path) == [0, 0]


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.redelivery])
def test_each_kind_that_says_so_can_be_replayed_to(kind: SinkKind) -> None:
    assert replayed_kind(kind.name) is kind
    assert callable(kind.load_redelivery())


@pytest.mark.parametrize("name", ["alerts", "xy"])
def test_a_sink_of_the_present_and_one_that_is_none_are_mistakes(name: str) -> None:
    with pytest.raises(UserError, check=has_words("--sink", "remote_write", "store", "rows")):
        replayed_kind(name)


async def test_what_lies_under_the_key_of_marks_and_is_none_hides_no_letter() -> None:
    on = bus()
    await reject(on, record_of(event(0)))
    async with on.producer() as producer:
        junk = Message(DEAD_LETTERS.name.encode(), b"no mark", 1)
        await producer.publish(DEAD_LETTERS.name, 0, [junk])
    async with receiving() as receiver:
        assert counted(await to_receiver(on, receiver)) == (1, 0, 0, 0)
