"""A sender's duties, by their numbers in the checklist of docs/reference/series.md."""

import re
import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import cramjam
import msgspec
import pytest
from prometheus_client import REGISTRY

from gpuledger.ledger.families import FAMILIES
from gpuledger.ledger.usage import COUNTERS
from gpuledger.runtime import Readiness
from gpuledger_sinks.errors import PartialWriteError, ReceiverUnavailableError, RejectedError
from gpuledger_sinks.remote_write.active_series import ActiveSeries
from gpuledger_sinks.remote_write.wire import STALE_VALUE, Version
from gpuledger_sinks.remote_write.write_client import (
    METADATA_SECONDS,
    RemoteWriteClient,
    open_client,
)
from gpuledger_sinks.settings import OWN_LABELS, RemoteWriteSettings
from tests.fakes.seconds import Seconds
from tests.unit.deployment.components import ROOT
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    ManualClock,
    bus,
    dead_letters,
    entry,
    event,
    eventually,
    publish,
    running,
)
from tests.unit.sinks.receiver import Answer, Received, receiving
from tests.unit.sinks.remote_write.interval_samples import samples_of
from tests.unit.sinks.remote_write.messages import SampleMessage
from tests.unit.sinks.remote_write.oracle import (
    RequestV2,
    WriteRequest,
    decompress,
    parse,
    parse_compressed,
    parse_metadata,
    parse_v2,
)
from tests.unit.sinks.remote_write.sending import (
    AT,
    dropped,
    gauges_of_body,
    is_committed,
    nodes_in,
    publish_at_once,
    sink,
)

PROTOCOLS = ("1.0", "2.0")
CONTENT_TYPES = {
    "1.0": "application/x-protobuf",
    "2.0": "application/x-protobuf;proto=io.prometheus.write.v2.Request",
}
VERSIONS = {"1.0": "0.1.0", "2.0": "2.0.0"}
NOT_WRITTEN = Answer(204)
"""The response of a receiver of 1.0 that reads a request of 2.0 as an empty one."""


def written(samples: int, *, status: int = 204, text: str = "", **headers: str) -> Answer:
    """Return a response of a receiver that implements 2.0."""
    counts = {"X-Prometheus-Remote-Write-Samples-Written": str(samples)}
    return Answer(status, text, {**counts, **headers})


def speaking_2_0(body: bytes) -> Answer:
    """Accept requests of either version; count the written samples of 2.0."""
    return written(len(parse_compressed(body)))


async def write(
    url: str,
    *messages: SampleMessage,
    attempt: int = 0,
    readiness: Readiness | None = None,
    **settings: Any,  # noqa: ANN401  # settings
) -> list[int]:
    """Send each message; return how many of its samples were written."""
    given = RemoteWriteSettings(url=f"{url}/push?tenant=a", **settings)
    async with open_client(given, readiness=readiness) as client:
        return [await client.write(one, attempt=attempt) for one in messages or [SampleMessage()]]


async def received(**settings: Any) -> Received:  # noqa: ANN401  # settings
    """Return the only request that a receiver of both versions gets."""
    async with receiving(by_body=speaking_2_0) as receiver:
        await write(receiver.url, **settings)
    (request,) = receiver.received
    return request


def spoken(requests: list[Received]) -> list[str]:
    """Return the version of each request."""
    by_header = {header: protocol for protocol, header in VERSIONS.items()}
    return [by_header[one.headers["X-Prometheus-Remote-Write-Version"]] for one in requests]


@pytest.mark.parametrize(("protocol", "of"), [("1.0", WriteRequest), ("2.0", RequestV2)])
async def test_duty_1_a_request_is_protobuf_posted_to_the_full_configured_url(
    protocol: str,
    of: Any,  # noqa: ANN401  # a class made at run time
) -> None:
    request = await received(protocol=protocol)
    assert request.path == "/push"
    assert of.FromString(decompress(request.body)).timeseries


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_2_the_body_is_one_block_of_snappy(protocol: str) -> None:
    request = await received(protocol=protocol)
    assert request.headers["Content-Encoding"] == "snappy"
    assert not request.body.startswith(b"\xff\x06\x00\x00sNaPpY")  # the framed format
    assert cramjam.snappy.decompress_raw(request.body)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_3_the_content_type_is_that_of_the_version(protocol: str) -> None:
    request = await received(protocol=protocol)
    assert request.headers["Content-Type"] == CONTENT_TYPES[protocol]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_4_the_version_is_a_header(protocol: str) -> None:
    request = await received(protocol=protocol)
    assert request.headers["X-Prometheus-Remote-Write-Version"] == VERSIONS[protocol]


async def test_duty_5_the_user_agent_has_a_name_and_a_version() -> None:
    assert re.fullmatch(r"gpuledger/[\w.+-]+", (await received()).headers["User-Agent"])


@pytest.mark.parametrize(
    "reserved",
    ["Content-Encoding", "content-type", "User-Agent", "X-Prometheus-Remote-Write-Version"],
)
async def test_duty_6_headers_can_be_added_but_reserved_ones_cannot_be_overridden(
    reserved: str,
) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"headers: reserved header: {reserved}"):
        msgspec.convert({"headers": {reserved: "x"}}, RemoteWriteSettings)
    request = await received(headers={"X-Scope-OrgID": "team-a"})
    assert request.headers["X-Scope-OrgID"] == "team-a"


@pytest.mark.parametrize("version", Version)
def test_duty_7_times_are_milliseconds_and_values_are_doubles(version: Version) -> None:
    body = ActiveSeries().encode(samples_of(event(0, time_ns=START_NS + 1_500_000))).encode(version)
    series = parse(body) if version is Version.V1 else [one.series for one in parse_v2(body)]
    assert {one.time_ms for one in series} == {START_NS // 1_000_000 + 1}
    assert all(isinstance(one.value, float) for one in series)


@pytest.mark.parametrize("version", Version)
def test_duty_8_every_sample_has_all_labels_of_its_series_in_each_tick(version: Version) -> None:
    series = ActiveSeries()
    first, second = (
        {one.labels for one in parse_any(series.encode(samples_of(event(tick))).encode(version))}
        for tick in range(2)
    )
    assert first == second
    assert all(dict(labels).get("__name__") for labels in first)


def parse_any(body: bytes) -> list[Any]:
    """Parse a request of either version."""
    return parse_compressed(bytes(cramjam.snappy.compress_raw(body)))


@pytest.mark.parametrize("version", Version)
def test_duty_9_labels_are_sorted_and_none_is_empty_or_repeated(version: Version) -> None:
    booked = [entry(), entry(pod_uid=None, container_id=None)]
    series = ActiveSeries(external_labels={"Zone": "z", "_a": "b"})
    for one in parse_any(series.encode(samples_of(event(entries=booked))).encode(version)):
        names = [name.encode() for name, _ in one.labels]
        assert names == sorted(set(names))
        assert all(name and value for name, value in one.labels)


def test_duty_10_names_are_valid_for_every_receiver() -> None:
    for family in FAMILIES:
        for metric in family.metrics:
            assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric.name)
    for label in OWN_LABELS:
        assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label)


def test_duty_11_no_label_is_one_that_prometheus_reserves() -> None:
    assert not [label for label in OWN_LABELS if label.startswith("__")]
    with pytest.raises(
        msgspec.ValidationError, match="invalid Prometheus label name: '__replica__'"
    ):
        msgspec.convert({"external_labels": {"__replica__": "a"}}, RemoteWriteSettings)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_12_samples_of_a_series_are_sent_in_chronological_order(protocol: str) -> None:
    on = bus()
    await publish(on, *map(event, range(30)))
    async with (
        receiving(by_body=speaking_2_0) as receiver,
        running(sink(on, receiver, protocol=protocol, samples_per_request=40)),
    ):
        await eventually(is_committed(on, 30))
    sent: dict[Any, list[int]] = {}
    for request in receiver.received:
        for one in parse_compressed(request.body):
            sent.setdefault(one.labels, []).append(one.time_ms)
    assert len(receiver.received) > 1
    assert all(times == sorted(set(times)) for times in sent.values())


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_13_two_concurrent_requests_have_no_series_in_common(protocol: str) -> None:
    """A node is in one partition, and a partition waits for the answer to its request."""
    on = bus()
    stuck, goes = (nodes_in(partition)[0] for partition in (0, 1))

    def answer(body: bytes) -> Answer:
        is_stuck = stuck in {one.label("node") for one in parse_compressed(body)}
        return Answer(500) if is_stuck else speaking_2_0(body)

    async with (
        receiving(by_body=answer) as receiver,
        running(sink(on, receiver, protocol=protocol, poison_seconds=0, samples_per_request=1)),
    ):
        await publish(on, event(0, node=stuck), event(1, node=stuck))
        await publish(on, *(event(tick, node=goes) for tick in range(5)))
        await eventually(lambda: len(receiver.received) > 9)
        of_stuck = [one for r in receiver.received for one in gauges_of_body(r.body)]
        times = {one.time_ms for one in of_stuck if one.label("node") == stuck}
        assert times == {START_NS // 1_000_000}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("number", [14, 16, 29])
async def test_duties_14_16_29_a_request_is_repeated_whole_and_after_a_pause_on_5xx_and_429(
    protocol: str, number: int
) -> None:
    """Also if a part was written: such a receiver gets that part twice (duty_29)."""
    first = {
        14: Answer(503, "away"),
        16: Answer(429, "slower", {"Retry-After": "9"}),
        29: written(1, status=500, text="the rest later"),
    }[number]
    on, clock = bus(), ManualClock()
    await publish(on, event(0))
    async with (
        receiving(first, by_body=speaking_2_0) as receiver,
        running(sink(on, receiver, clock=clock, protocol=protocol)),
    ):
        await eventually(is_committed(on, 1))
    sent = [set(parse_compressed(request.body)) for request in receiver.received]
    assert len(sent) == 2
    assert sent[0] == sent[1]
    assert max(clock.slept) >= (9 if number == 16 else 0.25)
    assert await dead_letters(on) == []


@pytest.mark.parametrize(
    ("protocol", "answer"),
    [
        ("1.0", Answer(400, "out of order sample")),
        ("2.0", Answer(400, "out of order sample")),
        ("2.0", written(0, status=400, text="no such thing")),
    ],
)
async def test_duty_15_samples_that_the_receiver_rejects_or_accepts_are_not_sent_again(
    protocol: str, answer: Answer
) -> None:
    async with receiving(answer, by_body=speaking_2_0) as receiver:
        with pytest.raises(RejectedError, match=f"400 {answer.text}"):
            await write(receiver.url, protocol=protocol)
    assert len(receiver.received) == 1
    assert await received(protocol=protocol)  # fails if it arrived more than once


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_17_the_body_is_ignored_on_success_and_shown_verbatim_on_error(
    protocol: str,
) -> None:
    async with receiving(written(1, status=200, text="error: out of order")) as receiver:
        assert await write(receiver.url, protocol=protocol) == [1]
    words = "out of order sample: 'déjà vu'"
    async with receiving(Answer(400, words)) as receiver:
        with pytest.raises(RejectedError) as caught:
            await write(receiver.url, protocol=protocol)
    assert str(caught.value) == f"400 {words}"


@pytest.mark.parametrize("version", Version)
def test_duty_18_a_series_ends_with_a_stale_marker_and_no_other_value_equals_it(
    version: Version,
) -> None:
    series = ActiveSeries()
    begun = series.encode(samples_of(event(0, entries=[entry()]))).encode(version)
    ended = series.encode(samples_of(event(1, gpus=[]))).encode(version)
    assert STALE_VALUE not in begun
    values = [struct.pack("<d", one.value) for one in parse_any(ended)]
    # The node continues, and its pods are described: those series do not end.
    lasting = {"gpuledger_node_last_sample_timestamp_seconds", "gpuledger_pod_info"}
    assert lasting <= {one.name for one in parse_any(ended)}
    assert values.count(STALE_VALUE) == len(values) - len(lasting)
    assert len(values) == len(parse_any(begun))


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_duty_19_an_outage_of_the_receiver_loses_nothing(protocol: str) -> None:
    on, is_away = bus(), {True}
    await publish(on, *map(event, range(20)))

    def answer(body: bytes) -> Answer:
        return Answer(503) if is_away else speaking_2_0(body)

    async with receiving(by_body=answer) as receiver:
        async with running(sink(on, receiver, protocol=protocol)):
            await eventually(lambda: len(receiver.received) > 3)
        is_away.clear()
        seen = len(receiver.received)
        async with running(sink(on, receiver, protocol=protocol)):
            await eventually(is_committed(on, 20))
    sent = [one for r in receiver.received[seen:] for one in gauges_of_body(r.body)]
    assert {one.time_ms for one in sent} == {START_NS // 10**6 + 1000 * n for n in range(20)}


async def test_duty_26_a_2xx_without_a_count_of_written_samples_counts_as_415() -> None:
    async with receiving(NOT_WRITTEN, NOT_WRITTEN, NOT_WRITTEN) as receiver:
        assert await write(receiver.url, SampleMessage(3), SampleMessage(2)) == [3, 2]
    assert spoken(receiver.received) == ["2.0", "1.0", "1.0"]
    assert [len(parse_compressed(one.body)) for one in receiver.received] == [3, 3, 2]


@pytest.mark.parametrize("kind", ["Histograms", "Exemplars"])
async def test_duty_27_a_missing_count_in_a_response_to_2_0_is_zero(kind: str) -> None:
    answer = Answer(204, "", {f"X-Prometheus-Remote-Write-{kind}-Written": "0"})
    async with receiving(answer) as receiver:
        assert await write(receiver.url, SampleMessage(3)) == [0]
    assert spoken(receiver.received) == ["2.0"]


@pytest.mark.parametrize("count", ["", "-1", "many", "1.5", "9" * 5000])
async def test_duty_27_an_invalid_count_is_ignored(count: str) -> None:
    headers = {"X-Prometheus-Remote-Write-Samples-Written": count}
    async with receiving(Answer(204, "", headers)) as receiver:
        assert await write(receiver.url) == [1]
    assert spoken(receiver.received) == ["2.0", "1.0"]


async def test_duty_27_a_missing_count_in_a_response_to_1_0_is_ignored() -> None:
    async with receiving(NOT_WRITTEN) as receiver:
        assert await write(receiver.url, SampleMessage(3), protocol="1.0") == [3]


async def test_duty_28_a_partly_written_request_is_not_sent_again() -> None:
    answer = written(2, status=400, text="no label may be so long")
    async with receiving(answer) as receiver:
        with pytest.raises(PartialWriteError) as caught:
            await write(receiver.url, SampleMessage(3))
    assert caught.value.written == 2
    assert str(caught.value) == "2 of 3 samples were written: 400 no label may be so long"
    assert len(receiver.received) == 1


async def test_duty_28_a_count_above_the_number_of_samples_means_all() -> None:
    async with receiving(written(7), written(7, status=400)) as receiver:
        assert await write(receiver.url, SampleMessage(3), SampleMessage(3)) == [3, 3]


def unwritten() -> float:
    labels = {"sink": "remote_write"}
    return (
        REGISTRY.get_sample_value("gpuledger_sink_remote_write_unwritten_samples_total", labels)
        or 0.0
    )


def protocols() -> dict[str, float | None]:
    """Return the value of the metric for each version."""
    labels = {version: {"sink": "remote_write", "version": version} for version in PROTOCOLS}
    return {
        version: REGISTRY.get_sample_value("gpuledger_sink_protocol_info", of)
        for version, of in labels.items()
    }


def refusing(refused: str, text: str) -> Callable[[bytes], Answer]:
    """Write and count all samples except those of a node."""

    def answer(body: bytes) -> Answer:
        series = parse_compressed(body)
        taken = [one for one in series if one.label("node") != refused]
        is_whole = len(taken) == len(series)
        return written(len(taken), status=204 if is_whole else 400, text="" if is_whole else text)

    return answer


@pytest.mark.parametrize("text", ["out of order sample", "no label may be so long"])
async def test_duty_28_ticks_of_a_partly_written_request_become_dead_letters_and_others_count(
    text: str,
) -> None:
    on = bus()
    bad, good = nodes_in(AT.partition)[:2]
    before = unwritten()
    async with (
        receiving(by_body=refusing(bad, text)) as receiver,
        running(sink(on, receiver, protocol="auto")),
    ):
        await publish(on, event(0, node=good))
        await eventually(is_committed(on, 1))
        await publish_at_once(on, event(1, node=bad), event(1, node=good))
        await eventually(is_committed(on, 3))
        await publish_at_once(on, event(2, node=bad), event(2, node=good))
        await eventually(is_committed(on, 5))

    # The first tick of a node begins each of its counters with a 0.
    first_tick = parse_compressed(receiver.received[0].body)
    next_tick = [one for one in first_tick if one.time_ms == START_NS // 10**6]
    assert unwritten() - before == len(first_tick)
    written_first, sent_first = len(next_tick), len(next_tick) + len(first_tick)
    first, second, third = await dead_letters(on)
    # The response does not tell which of the two was rejected; separate requests do.
    assert (first.reason, second.reason) == ("partial", "partial")
    assert f"{written_first} of {sent_first} samples were written: 400 {text}" in first.detail
    assert third.offset == 3
    assert third.reason == ("out_of_order" if "order" in text else "rejected")
    sent = [one for r in receiver.received for one in parse_compressed(r.body)]
    assert len({(one.labels, one.time_ms) for one in sent}) == len(sent)


async def test_duty_28_delivered_samples_that_are_sent_again_with_new_ticks_are_repeated() -> None:
    on, before = bus(), dropped("repeated")
    await publish(on, *map(event, range(6)))
    first_new_ms = (START_NS + 3 * SECOND_NS) // 10**6

    def answer(body: bytes) -> Answer:
        series = parse_compressed(body)
        new = [one for one in series if one.time_ms >= first_new_ms]
        return written(len(new), status=400 if len(new) < len(series) else 204, text="out of order")

    async with receiving(by_body=answer) as receiver, running(sink(on, receiver, protocol="2.0")):
        await eventually(is_committed(on, 6))
    assert dropped("repeated") - before == 3
    assert await dead_letters(on) == []
    assert len(receiver.received) == 1


async def test_duty_28_a_partly_written_tick_becomes_a_dead_letter_with_its_own_reason() -> None:
    on = bus()
    answer = written(1, status=400, text="no label may be so long")
    async with receiving(answer) as receiver, running(sink(on, receiver, protocol="2.0")):
        await publish(on, event(0))
        await eventually(is_committed(on, 1))
    (dead_letter,) = await dead_letters(on)
    assert dead_letter.reason == "rejected"
    assert len(receiver.received) == 1


@pytest.mark.parametrize("samples", [1, 3])
async def test_duty_30_1_0_is_used_after_a_415(samples: int) -> None:
    readiness, before = Readiness(), Answer(415, "I speak prometheus.WriteRequest")
    async with receiving(before) as receiver:
        sent = [SampleMessage(samples), SampleMessage(1)]
        assert await write(receiver.url, *sent, readiness=readiness) == [samples, 1]
    assert spoken(receiver.received) == ["2.0", "1.0", "1.0"]
    shown = readiness.check("remote_write.protocol")
    assert shown.is_ok
    assert shown.detail == "remote-write 1.0: 415 I speak prometheus.WriteRequest"
    assert protocols() == {"1.0": 1, "2.0": 0}


async def test_duty_30_1_0_is_used_after_a_400_if_the_receiver_accepts_the_same_in_1_0() -> None:
    def answer(body: bytes) -> Answer:
        is_1_0 = decompress(body)[:1] == b"\x0a"
        return NOT_WRITTEN if is_1_0 else Answer(400, "proto: illegal wireType 7")

    async with receiving(by_body=answer) as receiver:
        assert await write(receiver.url, SampleMessage(3), SampleMessage(2)) == [3, 2]
    assert spoken(receiver.received) == ["2.0", "1.0", "1.0"]


async def test_duty_30_a_sample_that_is_rejected_in_both_versions_decides_nothing() -> None:
    """A receiver of 1.0 whose first request has a sample that it rejects."""

    def answer(body: bytes) -> Answer:
        plain = decompress(body)
        is_refused = plain[:1] == b"\x22" or b"bad" in plain
        return Answer(400, "no such label") if is_refused else NOT_WRITTEN

    async with receiving(by_body=answer) as receiver:
        given = RemoteWriteSettings(url=receiver.url)
        async with open_client(given) as client:
            with pytest.raises(RejectedError, match="400 no such label"):
                await client.write(SampleMessage(name="bad_bytes"), attempt=0)
            assert await client.write(SampleMessage(), attempt=0) == 1
            assert await client.write(SampleMessage(), attempt=0) == 1
    assert spoken(receiver.received)[-3:] == ["2.0", "1.0", "1.0"]


async def test_duty_30_a_receiver_that_has_answered_2_0_does_not_get_1_0_after_a_400() -> None:
    refused = Answer(400, "no such label")
    async with receiving(written(1), refused, written(0), refused) as receiver:
        given = RemoteWriteSettings(url=receiver.url)
        async with open_client(given) as client:
            await client.write(SampleMessage(), attempt=0)
            with pytest.raises(RejectedError, match="400 no such label"):
                await client.write(SampleMessage(), attempt=0)
    assert set(spoken(receiver.received)) == {"2.0"}


async def test_duty_30_a_receiver_of_only_2_0_without_counts_in_a_400_keeps_2_0() -> None:
    """It answers 1.0 with 415; samples that it rejects in 2.0 are rejected."""

    def answer(body: bytes) -> Answer:
        plain = decompress(body)
        if plain[:1] != b"\x22":
            return Answer(415, "2.0 alone")
        return Answer(400, "no such label") if b"bad" in plain else written(0)

    async with receiving(by_body=answer) as receiver:
        with pytest.raises(RejectedError, match="400 no such label"):
            await write(receiver.url, SampleMessage(name="bad_bytes"))


async def test_duty_30_a_receiver_of_only_2_0_is_detected_again_after_another_server_answered() -> (
    None
):
    """Such as a proxy that accepts everything while the receiver restarts."""
    async with (
        receiving(NOT_WRITTEN, NOT_WRITTEN, Answer(415, "2.0 alone"), written(1)) as receiver,
        open_client(RemoteWriteSettings(url=receiver.url)) as client,
    ):
        assert await client.write(SampleMessage(), attempt=0) == 1
        with pytest.raises(ReceiverUnavailableError, match=r"415 2\.0 alone"):
            await client.write(SampleMessage(), attempt=0)
        assert await client.write(SampleMessage(), attempt=1) == 1
    assert spoken(receiver.received) == ["2.0", "1.0", "1.0", "2.0"]


@pytest.mark.parametrize("protocol", ["1.0", "2.0"])
async def test_duty_30_the_configured_version_is_used_whatever_the_answer(protocol: str) -> None:
    async with receiving(*[Answer(415, "no")] * 3) as receiver:
        settings = RemoteWriteSettings(url=receiver.url, protocol=protocol)  # type: ignore[arg-type]  # one of them
        async with open_client(settings) as client:
            for attempt in range(3):
                with pytest.raises(ReceiverUnavailableError, match=r"check remote_write\.protocol"):
                    await client.write(SampleMessage(), attempt=attempt)
    assert spoken(receiver.received) == [protocol] * 3


@pytest.mark.parametrize("answer", [NOT_WRITTEN, Answer(415, "what is that?")])
async def test_duty_30_if_2_0_is_configured_the_sink_waits_for_the_receiver_and_names_the_setting(
    answer: Answer,
) -> None:
    async with receiving(answer) as receiver:
        with pytest.raises(ReceiverUnavailableError, match=r"2\.0; check remote_write\.protocol"):
            await write(receiver.url, protocol="2.0")
    assert spoken(receiver.received) == ["2.0"]


@pytest.mark.parametrize(
    ("headers", "protocol"),
    [
        ({"X-Prometheus-Remote-Write-Version": "2.0.0", "Server": "Prometheus/3.5"}, "1.0"),
        (
            {
                "X-Prometheus-Remote-Write-Version": "0.1.0",
                "X-Prometheus-Remote-Write-Samples-Written": "1",
            },
            "2.0",
        ),
    ],
)
async def test_duty_31_response_headers_do_not_decide_the_version(
    headers: Mapping[str, str], protocol: str
) -> None:
    async with receiving(Answer(204, "", headers)) as receiver:
        await write(receiver.url)
    assert spoken(receiver.received)[-1] == protocol


def speaking_1_0(url: str, clock: Seconds) -> AbstractAsyncContextManager[RemoteWriteClient]:
    settings = RemoteWriteSettings(url=url, protocol="1.0")
    return open_client(settings, monotonic=clock)


async def test_metadata_is_sent_in_1_0_at_the_start_and_then_periodically() -> None:
    clock = Seconds()
    async with receiving() as receiver, speaking_1_0(receiver.url, clock) as client:
        for seconds in (0.0, METADATA_SECONDS / 2, METADATA_SECONDS / 2, 1.0):
            clock.advance(seconds)
            await client.write(SampleMessage(), attempt=0)
    reported = [parse_metadata(decompress(one.body)) for one in receiver.received]
    names = {metric.name for family in (*FAMILIES, COUNTERS) for metric in family.metrics}
    assert [names - set(one) for one in reported] == [set(), names, set(), names]
    assert "gpuledger_gpu_power_max_watts" in reported[0]
    assert reported[0]["gpuledger_gpu_energy_joules_total"].kind == "counter"
    assert reported[0]["gpuledger_gpu_power_watts"].help == "Power draw."
    assert reported[0]["gpuledger_gpu_power_watts"].unit == "watts"


async def test_a_receiver_that_rejects_metadata_gets_the_samples_without_it() -> None:
    def answer(body: bytes) -> Answer:
        return Answer(400, "what is field 3?") if parse_metadata(decompress(body)) else NOT_WRITTEN

    async with receiving(by_body=answer) as receiver:
        assert await write(receiver.url, protocol="1.0") == [1]


async def test_metadata_is_sent_again_to_a_receiver_that_was_unavailable() -> None:
    clock = Seconds()
    async with receiving() as receiver, speaking_1_0(receiver.url, clock) as client:
        await client.write(SampleMessage(), attempt=0)
        receiver.hangs_up = True
        with pytest.raises(ReceiverUnavailableError):
            await client.write(SampleMessage(), attempt=0)
        receiver.hangs_up = False
        for _ in range(3):
            await client.write(SampleMessage(), attempt=1)
    reported = [bool(parse_metadata(decompress(one.body))) for one in receiver.received]
    assert reported == [True, False, False, True, False]


NOT_OURS = {24: "events have no exemplars", 25: "nor native histograms"}


def test_every_duty_of_a_sender_of_samples_has_a_test_and_a_row_of_the_page() -> None:
    """Duties without a test concern data that gpuledger does not send."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    tested = {int(number) for number in re.findall(r"def test_duty_(\d+)_", tests)}
    for several in re.findall(r"def test_duties_((?:\d+_)+)", tests):
        tested |= {int(number) for number in several.split("_") if number}
    assert tested == set(range(1, 32)) - NOT_OURS.keys()
    page = (ROOT / "docs" / "reference" / "series.md").read_text()
    rows = {int(number) for number in re.findall(r"^\| (\d{1,2}) \|", page, re.MULTILINE)}
    assert rows == set(range(1, 32))
