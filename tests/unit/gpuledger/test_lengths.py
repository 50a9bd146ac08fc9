"""Every text, list and mapping of a record has a maximum length, and the error names its field."""

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuledger import records
from gpuledger.bus.limits import MAX_MESSAGE_BYTES
from gpuledger.codec import Decoder, encode
from gpuledger.errors import UndecodableError
from gpuledger.records import (
    ContainerRef,
    DeviceAllocation,
    GpuReading,
    Incident,
    NodeSample,
    PodRecord,
    Severity,
)
from gpuledger.records.base import ArrayRecord, BaseRecord
from gpuledger.records.bounds import MAX_CONTAINERS, MAX_GPUS, MAX_SENTENCE_LENGTH, MAX_WORD_LENGTH
from gpuledger.records.fitting import fit, fit_bytes
from tests.errors import has_words
from tests.tables import for_each
from tests.unit.enricher.join.ticks import pod, process, process_end, reading, sample

RECORDS = [one for name in records.__all__ if issubclass(one := getattr(records, name), BaseRecord)]
each_record = for_each("record", RECORDS)


class Bounded(NamedTuple):
    """A field, and how to make a value of a given length for it."""

    record: type[BaseRecord]
    field: str
    kind: Any
    limits: msgspec.Meta

    def value(self, length: int) -> Any:  # noqa: ANN401 - any type annotation
        if self.kind is str:
            return "x" * length
        inner = get_args(self.kind)
        if get_origin(self.kind) is dict:
            return {f"{number}": any_of(inner[1]) for number in range(length)}
        return [any_of(inner[0])] * length


def any_of(hint: Any) -> Any:  # noqa: ANN401 - any type annotation
    """Return a short value of a type."""
    if get_origin(hint) in (Union, UnionType):
        return None
    if get_origin(hint) is Annotated:
        kind, limits = get_args(hint)
        return any_of(kind) if limits.pattern is None else "a"
    if isinstance(hint, type) and issubclass(hint, BaseRecord):
        return least(hint)
    if isinstance(hint, type) and issubclass(hint, str) and hint is not str:
        return next(iter(hint))  # type: ignore[call-overload]  # an enumeration
    return {str: "x", int: 0, float: 0.0, bool: True, list: [], dict: {}}[get_origin(hint) or hint]


def least(record: type[BaseRecord], **given: object) -> dict[str, Any] | list[Any]:
    """Return the JSON of a record with its required fields and the given ones."""
    hints = get_type_hints(record, include_extras=True)
    names = record.__struct_fields__
    every: list[Any] = [given.get(name, any_of(hints[name])) for name in names]
    if issubclass(record, ArrayRecord):
        return every
    return {name: value for name, value in zip(names, every, strict=True) if value is not None}


def lengths_in(record: type) -> Iterator[tuple[str, Any, msgspec.Meta | None]]:
    """Yield each text, list and mapping among a record's fields, with its limits."""
    for name, hint in get_type_hints(record, include_extras=True).items():
        for kind, limits in _lengths(hint):
            yield name, kind, limits


def _lengths(hint: Any, limits: msgspec.Meta | None = None) -> Iterator[Any]:  # noqa: ANN401 - any type annotation
    origin = get_origin(hint)
    if origin is Annotated:
        kind, limits = get_args(hint)
        yield from _lengths(kind, limits)
    elif origin in (Union, UnionType):
        for part in get_args(hint):
            yield from _lengths(part)
    elif origin in (list, dict):
        yield hint, limits
        for part in get_args(hint):
            yield from _lengths(part)
    elif hint is str:
        yield hint, limits


def bounded_fields() -> Iterator[Bounded]:
    for record in RECORDS:
        for name, hint in get_type_hints(record, include_extras=True).items():
            found = next(_lengths(hint), None)
            if found and found[1] and found[1].pattern is None:
                yield Bounded(record, name, *found)


each_field = for_each("bounded", list(bounded_fields()))


@each_record
def test_every_text_list_and_mapping_of_every_record_has_a_bound(record: type) -> None:
    unbounded = [
        name
        for name, _, limits in lengths_in(record)
        if limits is None or limits.max_length is None
    ]

    assert unbounded == []


@each_field
def test_a_value_at_its_bound_is_decoded_and_one_beyond_it_is_refused_by_name(
    bounded: Bounded,
) -> None:
    decoder: Decoder[Any] = Decoder(topic="t", record=bounded.record)
    max_length = bounded.limits.max_length
    assert max_length is not None

    written = [
        msgspec.json.encode(least(bounded.record, **{bounded.field: bounded.value(length)}))
        for length in (max_length, max_length + 1)
    ]

    decoder.decode(written[0])
    with pytest.raises(
        UndecodableError, match=rf"field \S*{bounded.field}\b.* length <= {max_length}"
    ):
        decoder.decode(written[1])


@pytest.mark.parametrize("labels", [{"k" * 318: "v"}, {"k": "v" * 64}])
def test_a_key_or_a_value_beyond_its_bound_is_refused_by_the_name_of_its_mapping(
    labels: dict[str, str],
) -> None:
    decoder = Decoder(topic="t", record=PodRecord)

    with pytest.raises(UndecodableError, check=has_words("field labels")):
        decoder.decode(msgspec.json.encode(least(PodRecord, labels=labels)))


@each_field
def test_a_record_that_was_cut_to_fit_is_encoded_and_reports_the_cuts(bounded: Bounded) -> None:
    max_length = bounded.limits.max_length
    assert max_length is not None
    # Processes whose device is not in the tick are removed as well.
    devices = {"gpus": [least(GpuReading)]} if bounded.record is NodeSample else {}
    made: Any = msgspec.convert(least(bounded.record, **devices), bounded.record)
    long = _values_of(bounded, max_length + 3)
    expected = 1 if bounded.kind is str else 3
    made = msgspec.structs.replace(made, **{bounded.field: long})

    fitted, cut = fit(made)

    assert cut == {f"{bounded.record.__name__}.{bounded.field}": expected}
    assert len(getattr(fitted, bounded.field)) == max_length
    Decoder(topic="t", record=bounded.record).decode(encode(fitted))


def _values_of(bounded: Bounded, length: int) -> Any:  # noqa: ANN401 - any type annotation
    """Return a value of this length, which a decoder would reject."""
    hint = get_type_hints(bounded.record, include_extras=True)[bounded.field]
    return msgspec.convert(bounded.value(length), next(_lengths(hint))[0])


def test_a_record_that_fits_is_left_unchanged() -> None:
    tick = sample(processes=[process()], ended_processes=[process_end()])

    fitted, cut = fit(tick)

    assert fitted == tick
    assert not cut
    assert fit(pod())[0] == pod()


def test_processes_are_removed_with_their_device_or_container() -> None:
    containers = [ContainerRef(container_id=f"{number}") for number in range(MAX_CONTAINERS + 2)]
    gpus = [reading(uuid=f"GPU-{number}") for number in range(MAX_GPUS + 1)]
    tick = sample(
        gpus=gpus,
        containers=containers,
        processes=[
            process(container=0),
            process(container=MAX_CONTAINERS - 1),
            process(container=MAX_CONTAINERS),
            process(gpu=MAX_GPUS),
        ],
        ended_processes=[process_end(container=MAX_CONTAINERS + 1)],
    )

    fitted, cut = fit(tick)

    assert [one.container for one in fitted.processes] == [0, MAX_CONTAINERS - 1]
    assert cut == {
        "NodeSample.gpus": 1,
        "NodeSample.containers": 2,
        "NodeSample.processes": 2,
        "NodeSample.ended_processes": 1,
    }
    Decoder(topic="t", record=NodeSample).decode(encode(fitted))


def test_a_value_deep_in_a_record_is_cut_too() -> None:
    fitted, cut = fit(sample(gpus=[reading(model="H" * 1_000_000)]))

    assert fitted.gpus[0].model == "H" * MAX_WORD_LENGTH
    assert cut == {"GpuReading.model": 1}


def test_a_long_message_of_an_incident_is_cut() -> None:
    incident = Incident(
        cluster="default",
        node="n",
        boot_id="b",
        gpu_uuid="G",
        time_ns=1,
        kind="xid",
        source="kmsg",
        severity=Severity.INFO,
        message="m" * MAX_MESSAGE_BYTES,
        processes=[],
    )

    assert len(encode(fit(incident)[0])) < MAX_SENTENCE_LENGTH + 300


def large_tick(*, containers: int, processes: int, allocations: int, ended: int) -> NodeSample:
    rows = [
        DeviceAllocation(
            gpu_uuid="GPU-a",
            device_id=f"GPU-a::{number}",
            resource_name="nvidia.com/gpu.shared",
            namespace="research",
            pod=f"p-{number}",
            container="main",
        )
        for number in range(allocations)
    ]
    refs = [ContainerRef(container_id=f"{number:064}") for number in range(containers)]
    return sample(
        containers=refs,
        processes=[process(container=number % containers or None) for number in range(processes)],
        allocations=rows,
        ended_processes=[process_end(container=None)] * ended,
    )


@given(
    st.builds(
        large_tick,
        containers=st.integers(1, 40),
        processes=st.integers(0, 40),
        allocations=st.integers(0, 40),
        ended=st.integers(0, 20),
    ),
    st.integers(1_500, 20_000),
)
def test_a_record_is_cut_to_a_number_of_bytes_and_each_row_is_kept_or_counted(
    tick: NodeSample, max_bytes: int
) -> None:
    fitted, cut = fit_bytes(tick, max_bytes=max_bytes)

    assert len(encode(fitted)) <= max_bytes
    for name in ("gpus", "containers", "allocations", "processes", "ended_processes"):
        kept, given = getattr(fitted, name), getattr(tick, name)
        assert len(kept) + cut[f"NodeSample.{name}"] == len(given)
    assert fitted.allocations == tick.allocations[: len(fitted.allocations)]
    if len(encode(tick)) < max_bytes - 50:
        assert (fitted, cut) == (tick, {})
    # Allocations that were cut off are not idle time.
    assert fitted.allocations_unknown == (fitted.allocations != tick.allocations or None)
    Decoder(topic="t", record=NodeSample).decode(encode(fitted))


def test_a_large_list_leaves_the_rows_of_small_lists_complete() -> None:
    tick = large_tick(containers=5, processes=10_000, allocations=20, ended=3)

    fitted, cut = fit_bytes(tick, max_bytes=100_000)

    assert set(cut) == {"NodeSample.processes"}
    assert len(encode(fitted)) > 99_000
