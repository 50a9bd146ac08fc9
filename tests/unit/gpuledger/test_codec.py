"""An invalid value is named by topic and field; a decoded record can be encoded again."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import orjson
import pytest

from gpuledger.codec import Decoder, decoder_of, encode, validate
from gpuledger.errors import UndecodableError
from gpuledger.records import (
    ContainerRef,
    GpuDetails,
    GpuReading,
    Incident,
    NodeSample,
    PodRecord,
)
from gpuledger.records.base import MAX_SEQ
from tests.default_topics import BY_NAME, TOPICS
from tests.errors import has_words

MESSAGES = Path(__file__).parents[2] / "data" / "messages"

SAMPLE: dict[str, object] = {
    "cluster": "default",
    "node": "n",
    "boot_id": "b",
    "seq": 1,
    "time_ns": 1,
    "interval_ns": 1,
    "gpus": [["u", 0]],
    "containers": [],
    "processes": [],
    "allocations": [],
}
POD: dict[str, object] = {
    "uid": "u",
    "namespace": "n",
    "name": "n",
    "node": "n",
    "labels": {},
    "containers": [],
    "phase": "Running",
    "created_time_ns": 1,
    "resource_version": "1",
}
TOO_DEEP = b"[" * 100_000 + b"]" * 100_000

# Changes of the sample, and the error for each.
BAD_SAMPLES: list[tuple[dict[str, object], str]] = [
    ({"seq": "x"}, "field seq: Expected `int`, got `str`; value 'x'"),
    ({"seq": 1.5}, "field seq: Expected `int`, got `float`; value 1.5"),
    ({"seq": -1}, "field seq: Expected `int` >= 0; value -1"),
    ({"seq": None}, "field seq: Expected `int`, got `null`; value None"),
    ({"gpus": {}}, "field gpus: Expected `array`, got `object`; value {}"),
    (
        {"gpus": [["u", 0], ["v", "x"]]},
        "field gpus[1].index: Expected `int`, got `str`; value 'x'",
    ),
    (
        # The store keeps it in 32 bits, and a record that decodes must never stop a sink.
        {"gpus": [["u", 2**31]]},
        "field gpus[0].index: Expected `int` <= 2147483647; value 2147483648",
    ),
    ({"gpus": [["u"]]}, "field gpus[0].index: missing; value ['u']"),
    (
        # Any other word may be a newer version's.
        {"processes": [[0, 1, ""]]},
        "field processes[0].kind: Invalid enum value ''; value ''",
    ),
]
BAD_PODS: list[tuple[dict[str, object], str]] = [
    ({"labels": {"a.b": 1}}, "field labels[...]: Expected `str`, got `int`; value {'a.b': 1}"),
    (
        {"containers": [{"name": "c", "restarts": 0, "requested": {"resources": {"x": -1}}}]},
        "field containers[0].requested.resources[...]: Expected `int` >= 0",
    ),
]
BAD_BYTES = [
    (None, "unexpected tombstone (no value)"),
    (b"", "not JSON of this topic's record: Input data was truncated; value b''"),
    (b"{", "not JSON of this topic's record: Input data was truncated; value b'{'"),
    (b"\xff\xfe", "not JSON of this topic's record: JSON is malformed"),
    (b'{"node": "\xff"}', "not JSON of this topic's record: 'utf-8' codec can't decode"),
    (encode(SAMPLE) + b"x", "not JSON of this topic's record: JSON is malformed: trailing"),
    (b"[1]", "field (the record): Expected `object`, got `array`; value [1]"),
    (b"null", "field (the record): Expected `object`, got `null`; value None"),
    (b"{}", "field cluster: missing; value {}"),
    (b'{"spare": ' + TOO_DEEP + b"}", "not JSON of this topic's record: maximum recursion"),
    (b'{"node": 1, "spare": ' + TOO_DEEP + b"}", "field node: Expected `str`, got `int`"),
]


@pytest.mark.parametrize(("change", "output"), BAD_SAMPLES)
def test_the_field_and_its_value_are_named_in_a_tick(
    change: dict[str, object], output: str
) -> None:
    decoder = Decoder(topic="a.topic", record=NodeSample)

    with pytest.raises(UndecodableError) as raised:
        decoder.decode(orjson.dumps(SAMPLE | change))

    assert str(raised.value) == f"a.topic: {output}"


@pytest.mark.parametrize(("change", "output"), BAD_PODS)
def test_a_mapping_is_shown_as_a_whole(change: dict[str, object], output: str) -> None:
    decoder = Decoder(topic="a.topic", record=PodRecord)

    with pytest.raises(UndecodableError) as raised:
        decoder.decode(orjson.dumps(POD | change))

    assert str(raised.value).startswith(f"a.topic: {output}")


@pytest.mark.parametrize(("value", "output"), BAD_BYTES, ids=lambda given: repr(given)[:40])
def test_bytes_that_are_not_a_record_are_explained(value: bytes | None, output: str) -> None:
    decoder = Decoder(topic="a.topic", record=NodeSample)

    with pytest.raises(UndecodableError) as raised:
        decoder.decode(value)

    assert str(raised.value).startswith(f"a.topic: {output}")


@pytest.mark.parametrize("number", [2**63, 2**64, 10**40, -(2**64)])
def test_a_number_that_could_not_be_encoded_again_is_refused(number: int) -> None:
    decoder = Decoder(topic="a.topic", record=GpuDetails)

    with pytest.raises(UndecodableError, match="field memory_temperature_celsius"):
        decoder.decode(b'{"uuid":"u","memory_temperature_celsius":%d}' % number)


def test_a_long_value_is_shown_in_part() -> None:
    with pytest.raises(UndecodableError) as raised:
        Decoder(topic="a.topic", record=NodeSample).decode(b'{"node": "' + b"x" * 100_000)

    assert len(str(raised.value)) < 300
    assert str(raised.value).endswith("…")


def test_an_absent_field_gets_no_key_and_is_read_as_none() -> None:
    details = GpuDetails(uuid="u", power_instant_milliwatts=None, memory_temperature_celsius=0)

    assert encode(details) == b'{"uuid":"u","memory_temperature_celsius":0}'
    assert details.power_instant_milliwatts is None


def test_an_absent_field_of_an_array_record_keeps_its_position() -> None:
    container = ContainerRef(pod_uid="u")

    assert encode(container) == b'[null,"u",null]'
    assert Decoder(topic="a.topic", record=ContainerRef).decode(b'[null,"u"]') == container
    assert Decoder(topic="a.topic", record=ContainerRef).decode(b"[]") == ContainerRef()


@pytest.mark.parametrize(
    ("record", "output"),
    [
        (GpuDetails(uuid="u", performance_state=-1), "Expected `int` >= 0"),
        (GpuReading(uuid="u", index=-1), "Expected `int` >= 0"),
        (GpuReading(uuid="u", index=2**70), "Expected `int` <= 2147483647"),
        (GpuDetails(uuid="u", encoder_utilization_ratio=math.nan), "Expected `float`"),
        (GpuDetails(uuid="u", encoder_utilization_ratio=math.inf), "Expected `float`"),
        (GpuDetails(uuid=cast("str", None)), "Expected `str`, got `null`"),
        (GpuDetails(uuid=cast("str", b"u")), "Expected `str`, got `bytes`"),
        (GpuDetails(uuid=cast("str", object())), "object"),
    ],
)
def test_validation_refuses_records_that_no_reader_could_decode(
    record: object, output: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=output):
        validate(record)


def test_validation_names_the_place_of_the_error() -> None:
    sample = NodeSample(
        cluster="default",
        node="n",
        boot_id="b",
        seq=1,
        time_ns=1,
        interval_ns=1,
        gpus=[GpuReading(uuid="u", index=0, power_milliwatts=-1)],
        containers=[],
        processes=[],
        allocations=[],
    )
    with pytest.raises(msgspec.ValidationError, check=has_words("$.gpus[0].power_milliwatts")):
        validate(sample)


def test_a_null_of_another_writer_is_read_as_absent() -> None:
    decoder = Decoder(topic="a.topic", record=GpuDetails)

    assert decoder.decode(b'{"uuid":"u","limits":null}') == GpuDetails(uuid="u")


def test_a_topic_and_its_record_share_one_decoder() -> None:
    assert decoder_of("a.topic", GpuReading) is decoder_of("a.topic", GpuReading)
    assert decoder_of("a.topic", GpuReading) is not decoder_of("b.topic", GpuReading)


def records_with(field: str) -> list[tuple[str, dict[str, Any]]]:
    """Return a golden message of each topic whose record has this field at the top level."""
    found = []
    for topic in TOPICS:
        messages = sorted((MESSAGES / topic.name).glob("*.json"))
        decoded = orjson.loads(messages[0].read_bytes())
        if field in decoded:
            found.append((topic.name, decoded))
    return found


BAD_NAMES = ["", "n" * 254, "x" * 10_240, "a/b", "_a", "-a", "a-", ".a", "a..b", "a\n", "a b"]
GOOD_NAMES = ["n", "0", "gpu-node-1", "10.0.0.1", "ip-10-0-0-1.ec2.internal", "n" * 253]
GOOD_NAMES += ["GPU_7", "DGX-A100.Example.com", "a__b"]


@pytest.mark.parametrize(("topic", "message"), records_with("node"))
def test_a_nodes_name_follows_the_rules_of_hosts_in_every_record(
    topic: str, message: dict[str, object]
) -> None:
    decode: Callable[[bytes], Any] = Decoder(topic=topic, record=BY_NAME[topic].record).decode
    for name in GOOD_NAMES:
        assert decode(orjson.dumps(message | {"node": name})).node == name
    for name in BAD_NAMES:
        with pytest.raises(UndecodableError, check=has_words(topic, "field node:")):
            decode(orjson.dumps(message | {"node": name}))


@pytest.mark.parametrize(("topic", "message"), records_with("seq"))
def test_a_seq_that_no_kernel_can_reach_is_refused_in_every_record(
    topic: str, message: dict[str, object]
) -> None:
    decode: Callable[[bytes], Any] = Decoder(topic=topic, record=BY_NAME[topic].record).decode
    assert decode(orjson.dumps(message | {"seq": MAX_SEQ})).seq == MAX_SEQ
    for seq in (MAX_SEQ + 1, 2**63 - 1):
        with pytest.raises(UndecodableError, check=has_words(topic, "field seq:")):
            decode(orjson.dumps(message | {"seq": seq}))


@pytest.mark.parametrize(("topic", "message"), records_with("boot_id"))
def test_a_boot_id_is_neither_empty_nor_long(topic: str, message: dict[str, object]) -> None:
    decode: Callable[[bytes], Any] = Decoder(topic=topic, record=BY_NAME[topic].record).decode
    for boot_id in ("", "b" * 65):
        with pytest.raises(UndecodableError, check=has_words(topic, "field boot_id:")):
            decode(orjson.dumps(message | {"boot_id": boot_id}))


@pytest.mark.parametrize("quoted", ["x" * 250_000, "\x7f" * 250_000, "\U0001f600" * 250_000])
def test_an_error_never_quotes_a_whole_value(quoted: str) -> None:
    """The decoder's own message quotes all of an enumeration's value."""
    value = orjson.dumps(
        {"cluster": "default", "node": "n", "boot_id": "b", "gpu_uuid": "g", "severity": quoted}
    )

    with pytest.raises(UndecodableError) as caught:
        Decoder(topic="a.topic", record=Incident).decode(value)

    assert len(str(caught.value)) < 400
