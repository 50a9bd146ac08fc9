"""A redacted recording names nobody; the same name always gets the same pseudonym."""

import orjson

from gpuledger_agent.recording.format import READ, RecordingLine
from gpuledger_agent.recording.recorder import Redactor

UUID = "GPU-0d07e64d-96cd-5282-9d68-4510288cf05a"
POD = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
CONTAINER = "c" * 64


def written(*lines: RecordingLine) -> list[dict[str, object]]:
    redactor = Redactor()
    return [orjson.loads(redactor.write(line)) for line in lines]


def test_the_same_identity_has_the_same_pseudonym_and_another_one_another() -> None:
    one, again, other = written(
        RecordingLine(at_ns=0, call="nvmlDeviceGetUUID", result=UUID),
        RecordingLine(at_ns=1, call="nvmlDeviceGetUUID", result=UUID),
        RecordingLine(at_ns=2, call="nvmlDeviceGetUUID", result=f"MIG-{POD}"),
    )
    assert one["result"] == again["result"] == "GPU-00000000-0000-4000-8000-000000000001"
    assert other["result"] == "MIG-00000000-0000-4000-8000-000000000002"


def test_a_pod_has_one_pseudonym_in_both_spellings_of_its_cgroup() -> None:
    slice_name = f"kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{CONTAINER}.scope"
    systemd, cgroupfs = written(
        RecordingLine(
            at_ns=0, call=READ, arguments=["/proc/7/cgroup"], result=f"0::/{slice_name}\n"
        ),
        RecordingLine(
            at_ns=0,
            call=READ,
            arguments=["/proc/8/cgroup"],
            result=f"0::/kubepods/pod{POD}/{CONTAINER}\n",
        ),
    )
    container = f"{2:064x}"
    assert systemd["result"] == (
        f"0::/kubepods-pod00000000_0000_4000_8000_000000000001.slice/cri-containerd-{container}"
        ".scope\n"
    )
    assert cgroupfs["result"] == (
        f"0::/kubepods/pod00000000-0000-4000-8000-000000000001/{container}\n"
    )


def test_programs_and_serials_are_numbered() -> None:
    stat, comm, serial = written(
        RecordingLine(
            at_ns=0, call=READ, arguments=["/proc/7/stat"], result="7 (secret (x)) S 1 2"
        ),
        RecordingLine(at_ns=0, call=READ, arguments=["/proc/7/comm"], result="secret (x)\n"),
        RecordingLine(at_ns=0, call="nvmlDeviceGetSerial", result="1650522003820"),
    )
    assert stat["result"] == "7 (program-1) S 1 2"
    assert comm["result"] == "program-1\n"
    assert serial["result"] == "name-2"


def test_the_pci_address_of_a_gpu_is_redacted() -> None:
    fields = {"domain": 3, "bus": 27, "device": 1, "busId": {"ascii": "00000003:1B:01.0"}}
    (line,) = written(
        RecordingLine(
            at_ns=0, call="nvmlDeviceGetPciInfo_v3", result={"struct": "x", "fields": fields}
        )
    )
    assert line["result"] == {
        "struct": "x",
        "fields": {
            "domain": 0, "bus": 0, "device": 0, "busId": {"ascii": "00000000:01:00.0"}
        },
    }  # fmt: skip


def test_measurements_are_kept() -> None:
    (line,) = written(RecordingLine(at_ns=5, call="nvmlDeviceGetPowerUsage", result=312_500))
    assert line["result"] == 312_500


def test_the_rack_of_a_gpu_is_redacted() -> None:
    fields = {
        "ibGuid": {"bytes": "ff00"}, "chassisSerialNumber": '18"2', "slotNumber": "\x0e"
    }  # fmt: skip
    struct = {"byref": {"struct": "c_nvmlPlatformInfo_v2_t", "fields": fields}}
    (line,) = written(
        RecordingLine(at_ns=0, call="nvmlDeviceGetPlatformInfo", result=0, filled=[struct])
    )
    reported = {"ibGuid": {"ascii": ""}, "chassisSerialNumber": {"ascii": ""}, "slotNumber": "\x0e"}
    assert line["filled"] == [{"byref": {"struct": "c_nvmlPlatformInfo_v2_t", "fields": reported}}]
