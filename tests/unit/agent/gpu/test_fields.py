"""Numbered fields are read together in one call, each checked by its own return code."""

from collections.abc import Sequence

import pynvml
import pytest

from gpuledger_agent.gpu.nvidia.catalogue import FieldValue
from gpuledger_agent.gpu.nvidia.device_client import DeviceClient
from gpuledger_agent.gpu.nvidia.query import FieldBatch, wanted_field
from gpuledger_agent.gpu.protocol import GpuLostError
from tests.fakes.nvml_pointers import FieldsFunction, play

CALL = "nvmlDeviceGetFieldValues"
UINT = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
DEGREES = (UINT, "uiVal", 61)


def batch(client: DeviceClient, numbers: Sequence[int]) -> FieldBatch:
    return FieldBatch(client, [wanted_field(f"field_{n}", FieldValue(n)) for n in numbers])


@pytest.mark.parametrize(
    ("kind", "member", "value"),
    [
        (pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", 0.5),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 2**32 - 1),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, "ulVal", 2**63),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal", 2**64 - 1),
        (pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG, "sllVal", -1),
        (pynvml.NVML_VALUE_TYPE_SIGNED_INT, "siVal", -40),
        (pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT, "usVal", 65535),
    ],
)
def test_a_value_is_read_as_the_type_it_declares(
    monkeypatch: pytest.MonkeyPatch, kind: int, member: str, value: float
) -> None:
    client = play(monkeypatch, {CALL: FieldsFunction({82: (kind, member, value)})})
    assert batch(client, [82]).query() == {"field_82": value}


def test_all_fields_are_read_in_one_call_and_a_refused_one_never_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction({82: DEGREES, 186: pynvml.NVML_ERROR_NOT_SUPPORTED})
    client = play(monkeypatch, {CALL: fields})
    assert batch(client, [82, 186, 9999]).query() == {"field_82": 61}
    assert fields.requests == [[82, 186, 9999]]
    assert client.outcomes == {
        (CALL,): None,
        (CALL, 82): None,
        (CALL, 186): "NotSupported",
        (CALL, 9999): "InvalidArgument",
    }


def test_a_field_that_fails_now_is_absent_now_and_queried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction({82: pynvml.NVML_ERROR_TIMEOUT, 83: DEGREES})
    requested = batch(play(monkeypatch, {CALL: fields}), [82, 83])
    assert requested.query() == {"field_83": 61}
    fields.known[82] = DEGREES
    assert requested.query() == {"field_82": 61, "field_83": 61}


def test_a_field_with_the_code_of_a_lost_gpu_reports_the_gpu_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction({82: pynvml.NVML_ERROR_GPU_IS_LOST})
    with pytest.raises(GpuLostError, match="nvmlDeviceGetFieldValues:82"):
        batch(play(monkeypatch, {CALL: fields}), [82]).query()


def test_if_an_unknown_number_fails_the_whole_call_each_is_tried_once_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction({82: DEGREES, 186: DEGREES}, strict=True)
    client = play(monkeypatch, {CALL: fields})
    assert batch(client, [82, 9999, 186]).query() == {"field_82": 61, "field_186": 61}
    assert client.outcomes[CALL, 9999] == "InvalidArgument"
    known = [number for number in (82, 9999, 186) if not client.is_unsupported((CALL, number))]
    assert batch(client, known).query() == {"field_82": 61, "field_186": 61}
    assert fields.requests == [[82, 9999, 186], [82], [9999], [186], [82, 186]]


def test_a_library_without_the_call_gives_no_field_and_is_tried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = play(monkeypatch, {})
    requested = batch(client, [82])
    assert [requested.query(), requested.query()] == [{}, {}]
    assert client.outcomes == {(CALL,): "FunctionNotFound"}
    assert client.support_version == 1


def test_a_call_that_fails_after_it_worked_is_not_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = FieldsFunction({82: DEGREES, 83: DEGREES})
    client = play(monkeypatch, {CALL: fields})
    requested = batch(client, [82, 83])
    requested.query()
    monkeypatch.setattr(
        pynvml, "_nvmlGetFunctionPointer", lambda _name: lambda *_: pynvml.NVML_ERROR_TIMEOUT
    )
    assert requested.query() == {}
    assert client.outcomes == {(CALL,): None, (CALL, 82): None, (CALL, 83): None}
