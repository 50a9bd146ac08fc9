"""Dead letters are found by their fields, and shown for people and for programs."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from gpuledger.bus.memory import MemoryBus
from gpuledger.bus.protocol import Message, Record, Unreadable, UnreadableReason
from gpuledger.errors import UserError
from gpuledger_cli.dead_letters.dead_letter_log import DeadLetterFilter, Position, parse_position
from gpuledger_cli.dead_letters.dead_letter_printing import DeadLetterPrinter, Format, print_counts
from gpuledger_cli.dead_letters.dead_letter_views import (
    DeadLetterCounts,
    full_text,
    hex_dump,
    parse_count_by,
)
from gpuledger_cli.dead_letters.dead_letters_command import find, scan
from tests.default_topics import DEAD_LETTERS, TOPICS
from tests.errors import has_words
from tests.unit.cli.dead_letters.builders import (
    JOIN,
    found_dead_letters,
    found_offsets,
    record_of,
    reject,
)
from tests.unit.enricher.join.ticks import sample
from tests.unit.sinks.builders import SECOND_NS, START_NS, bus, event

SECOND_MS = 1000
START_MS = START_NS // 10**6
NONE_OF_4 = "none of 4 dead-letter records matches"


@pytest.fixture
async def on() -> MemoryBus:
    """Four dead letters, a minute apart: two of remote-write, one of the store, one of the join."""
    on = bus()
    minute_ns = 60 * SECOND_NS
    await reject(on, record_of(event(0)), reason="out_of_order", detail="out of bounds")
    await reject(
        on,
        record_of(event(1, node="node-b"), offset=7),
        detail="label \x1b[31mtoo long",
        time_ns=START_NS + minute_ns,
    )
    await reject(
        on,
        record_of(b"\x00\xffno json"),
        consumer="gpuledger-store",
        reason="undecodable",
        time_ns=START_NS + 2 * minute_ns,
    )
    await reject(
        on,
        record_of(sample()),
        consumer=JOIN,
        reason="invalid",
        time_ns=START_NS + 3 * minute_ns,
    )
    return on


@pytest.mark.parametrize(
    ("wanted", "offsets"),
    [
        ({}, [0, 1, 2, 3]),
        ({"since_ms": START_MS + 60 * SECOND_MS}, [1, 2, 3]),
        ({"until_ms": START_MS + 60 * SECOND_MS}, [0]),
        ({"consumers": ["gpuledger-store", JOIN]}, [2, 3]),
        ({"reasons": ["rejected"]}, [1]),
        ({"topics": ["gpuledger.samples.v1"]}, [3]),
        ({"key": "default/node-b"}, [1]),
        ({"key": "node-b"}, []),
        ({"node": "node-b"}, [1]),
        ({"node": "default/node-b"}, [1]),
        ({"node": "node-a", "consumers": [JOIN]}, [3]),
        ({"positions": frozenset({Position(0, 1), Position(0, 3)})}, [1, 3]),
        ({"positions": frozenset({Position(0, 1)}), "reasons": ["invalid"]}, []),
    ],
)
async def test_a_dead_letter_is_found_by_each_of_its_fields(
    on: MemoryBus, wanted: dict[str, object], offsets: list[int]
) -> None:
    assert await found_offsets(on, **wanted) == offsets


async def listed(on: MemoryBus, *, format: Format, limit: int = 100) -> None:  # noqa: A002  # the option's
    printer = DeadLetterPrinter(format=format, limit=limit)
    await scan(on, DeadLetterFilter(), into=printer)
    printer.close()


async def test_the_table_has_one_line_per_dead_letter_and_the_newest_last(
    on: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    await listed(on, format="table")

    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["position", "when", "consumer", "reason"]
    assert [line.split()[0] for line in lines] == ["0:0", "0:1", "0:2", "0:3"]
    assert lines[0].split()[1:4] == [
        "2026-09-21T14:13:20Z",
        "gpuledger-remote-write",
        "out_of_order",
    ]
    assert "out of bounds" in lines[0]
    assert "[7]" not in lines[1]
    assert "@7" in lines[1]


@pytest.mark.parametrize("format_", ["table", "json", "csv"])
async def test_text_of_a_record_cannot_control_the_terminal(
    on: MemoryBus, format_: Format, capsys: pytest.CaptureFixture[str]
) -> None:
    await listed(on, format=format_)
    shown = capsys.readouterr().out

    assert "too long" in shown
    assert "\x1b" not in shown


async def test_json_has_one_object_per_line_and_csv_has_the_same_fields(
    on: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    await listed(on, format="json", limit=0)
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    await listed(on, format="csv")
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))

    assert [one["position"] for one in objects] == ["0:0", "0:1", "0:2", "0:3"]
    assert objects[2]["reason"] == "undecodable"
    assert objects[2]["size_bytes"] == 9
    assert [list(row) for row in rows] == [list(one) for one in objects]
    assert [row["detail"] for row in rows] == [one["detail"] for one in objects]


async def test_a_limit_keeps_the_newest_and_shows_the_total(
    on: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    await listed(on, format="csv", limit=2)

    shown = capsys.readouterr()
    assert [line.split(",")[0] for line in shown.out.splitlines()] == ["position", "0:2", "0:3"]
    assert "the newest 2 of 4" in shown.err


async def test_dead_letters_of_the_same_time_are_listed_by_position(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their nanoseconds, which the list does not show, have another order."""
    on = bus()
    for offset, late_ns in enumerate((2, 1, 0)):
        await reject(on, record_of(event(offset)), time_ns=START_NS + late_ns)
    await listed(on, format="csv")

    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(",")[0] for line in lines] == ["0:0", "0:1", "0:2"]


async def test_dead_letters_are_counted_with_their_first_and_last_time(
    on: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    await reject(on, record_of(event(2)), reason="out_of_order", time_ns=START_NS + 9 * SECOND_NS)
    counts = DeadLetterCounts(parse_count_by("consumer,reason"))
    await scan(on, DeadLetterFilter(), into=counts)
    print_counts(counts, format="csv")

    assert capsys.readouterr().out.splitlines()[:2] == [
        "consumer,reason,count,first,last",
        "gpuledger-remote-write,out_of_order,2,2026-09-21T14:13:20Z,2026-09-21T14:13:29Z",
    ]


async def test_records_that_are_not_dead_letters_are_counted_and_skipped(
    on: MemoryBus, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = b'{"topic":"t","partition":0,"offset":0,"consumer":"c","reason":"r","detail":"d",'
    async with on.producer() as producer:
        for value in (b"{", None, odd + b'"time_ns":1,"value_base64":"*"}'):
            await producer.publish(DEAD_LETTERS.name, 0, [Message(b"x", value, START_MS)])
    await listed(on, format="csv")

    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert "3 records of gpuledger.dead-letters.v1 are not dead-letter records" in shown.err


async def shown_dead_letter(on: MemoryBus, offset: int) -> str:
    (dead_letter,) = await found_dead_letters(on, positions=frozenset({Position(0, offset)}))
    return full_text(dead_letter, TOPICS)


async def test_a_dead_letter_is_shown_with_its_record_as_json_if_the_record_is_json(
    on: MemoryBus,
) -> None:
    text = await shown_dead_letter(on, 1)

    assert "rejected     2026-09-21T14:14:20Z by gpuledger-remote-write" in text
    assert "key          default/node-b" in text
    assert "a GpuEvent of gpuledger.events.v1" in text
    value = text.partition("gpuledger.events.v1:\n")[2]
    assert json.loads(value)["node"] == "node-b"
    assert "\n  " in value


async def test_an_undecodable_record_of_a_dead_letter_is_shown_as_its_first_bytes(
    on: MemoryBus,
) -> None:
    text = await shown_dead_letter(on, 2)

    assert "not a record of its topic (gpuledger.events.v1: not JSON" in text
    assert "00000000  00 ff 6e 6f 20 6a 73 6f 6e" in text
    assert "..no json" in text


async def test_a_dead_letter_of_a_batch_shows_the_offsets_of_its_records() -> None:
    on = bus()
    why = Unreadable(3, UnreadableReason.DAMAGED, "cut short")
    await reject(on, Record("t", 0, 9, 0, None, None, why), reason="unreadable")

    text = await shown_dead_letter(on, 0)
    assert "record       t, partition 0, offset 3 to 9" in text
    assert "the batch cannot be unpacked" in text


def test_a_dump_ends_after_its_first_bytes_and_states_how_many_remain() -> None:
    assert len(hex_dump(b"x" * 256).splitlines()) == 16
    assert hex_dump(b"x" * 300).splitlines()[-1] == "… 44 more bytes"


async def test_a_position_without_a_dead_letter_is_an_error_that_names_it(on: MemoryBus) -> None:
    wanted = DeadLetterFilter(positions=frozenset({Position(0, 1), Position(0, 99)}))
    with pytest.raises(UserError, check=has_words("0:99")):
        await find(on, wanted)


@pytest.mark.parametrize("text", ["17", "0:", ":17", "0:x", "-1:2", "0:17 "])
def test_an_invalid_position_is_an_error(text: str) -> None:
    with pytest.raises(UserError, check=has_words("PARTITION:OFFSET")):
        parse_position(text)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ({"consumers": [JOIN], "reasons": ["rejected"]}, NONE_OF_4),
        ({"topics": ["other"]}, f"{NONE_OF_4}; unknown topic 'other'"),
        (
            {"consumers": ["remote-write"]},
            f"{NONE_OF_4}; unknown consumer 'remote-write', did you mean gpuledger-remote-write?",
        ),
        (
            {"consumers": ["store"]},
            f"{NONE_OF_4}; unknown consumer 'store', did you mean gpuledger-store?",
        ),
        ({"key": "node-b"}, f"{NONE_OF_4}; unknown key 'node-b', did you mean default/node-b?"),
        ({"node": "nod-b"}, f"{NONE_OF_4}; unknown node 'nod-b', did you mean node-b?"),
        (
            {"reasons": ["rejectd"]},
            f"{NONE_OF_4}; unknown reason 'rejectd', did you mean rejected?",
        ),
        ({"since_ms": START_MS + 3600 * SECOND_MS}, "no dead-letter records since then"),
        ({}, ""),
    ],
)
async def test_if_no_dead_letter_matches_the_reason_is_shown(
    on: MemoryBus, wanted: dict[str, Any], why: str
) -> None:
    into = DeadLetterPrinter(format="table", limit=9)

    assert await scan(on, DeadLetterFilter(**wanted), into=into) == why


async def test_an_empty_topic_is_reported_as_such() -> None:
    into = DeadLetterPrinter(format="table", limit=9)

    assert (
        await scan(bus(), DeadLetterFilter(reasons=["rejected"]), into=into)
        == "no dead-letter records"
    )
