"""The driver's lines about XIDs, in all known forms."""

import pytest

from gpuledger.records import Severity
from gpuledger_agent.core.incidents import read_bus, read_xid_line, write_bus

BUS = (0, 0x1B, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid=1122, GPU has fallen off the bus.",
            (BUS, 79, 1122, None, "GPU has fallen off the bus."),
        ),
        (
            "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off",
            (BUS, 79, None, None, "GPU has fallen off"),
        ),
        (
            "NVRM: Xid (PCI:0000:1b:00): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000.",
            (BUS, 31, 79749, "exe", "Ch 0000000a, intr 00000000."),
        ),
        (
            "NVRM: Xid (PCI:0000:1b:00): 13, pid='4711', name='python3', Graphics Exception",
            (BUS, 13, 4711, "python3", "Graphics Exception"),
        ),
        ("NVRM: Xid (0000:1b:00): 13, 0003 00000000", (BUS, 13, None, None, "0003 00000000")),
        ("NVRM: Xid (PCI:1b:00): 48", (BUS, 48, None, None, "")),
        ("NVRM: Xid (PCI:0008:1B:00): 79, ", ((8, 0x1B, 0), 79, None, None, "")),
        ("NVRM: Xid (PCI:0000:1b:00.0): 62, 12b4(2d70)", (BUS, 62, None, None, "12b4(2d70)")),
        ("NVRM: Xid (PCI:0000:1b:00): 119, pid=7", (BUS, 119, 7, None, "")),
    ],
)
def test_a_line_is_parsed_in_every_form(
    text: str, expected: tuple[tuple[int, int, int], int, int | None, str | None, str]
) -> None:
    found = read_xid_line(text)

    assert found is not None
    assert (found.bus, found.xid, found.pid, found.command, found.words) == expected
    assert (found.gpu_instance, found.compute_instance, found.action) == (None, None, None)


@pytest.mark.parametrize(
    "before", [" ", "python[7]: ", "audit: comm=", "program said 'NVRM: loading' ", "NVRM: "]
)
def test_a_line_quoted_in_another_message_is_ignored(before: str) -> None:
    assert read_xid_line(f"{before}NVRM: Xid (PCI:0000:1b:00): 79, pid=7") is None


@pytest.mark.parametrize(
    ("where", "instances"),
    [("GPU-I:05", (5, None)), ("GPU-I:01 GPU-CI:02", (1, 2)), ("GPU-I:00 GPU-CI:00", (0, 0))],
)
def test_under_mig_a_line_names_the_instances(
    where: str, instances: tuple[int, int | None]
) -> None:
    found = read_xid_line(f"NVRM: Xid (PCI:0000:1b:00 {where}): 94, pid=7194, Contained: CE")

    assert found is not None
    assert (found.gpu_instance, found.compute_instance) == instances
    assert (found.bus, found.xid, found.pid) == (BUS, 94, 7194)


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", "RESET_GPU"),
        ("from 0x0 (None) to 0x1 (PF FLR)", "RESET_GPU"),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", "RESTART_BM"),
        ("from 0x0 (None) to 0x3 (Drain P2P)", "DRAIN_P2P"),
        ("from 0x3 (Drain P2P) to 0x4 (Drain and Reset)", "DRAIN_AND_RESET"),
        ("from 0x1 (GPU Reset Required) to 0x0 (None)", "NONE"),
    ],
)
def test_the_driver_reports_the_recovery_action_it_needs(change: str, action: str) -> None:
    found = read_xid_line(f"NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed {change}")

    assert found is not None
    assert found.action == action


@pytest.mark.parametrize(
    ("words", "severity"),
    [
        ("NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6)", Severity.CRITICAL),
        ("RLW_CTRL Nonfatal XC1 i0 Link -1 (0x004505c6)", None),
    ],
)
def test_an_nvlink_5_error_has_the_severity_of_its_sub_code(
    words: str, severity: Severity | None
) -> None:
    found = read_xid_line(f"NVRM: Xid (PCI:0009:01:00): 149, {words}")

    assert found is not None
    assert found.severity is severity


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: GPU 0000:1b:00.0: GPU has fallen off the bus.",
        "NVRM: Xid error: xyz, invalid data",
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: Xid (PCI:zzzz:66:00): 79",
        "NVRM: Xid (PCI:0000:66:00): 99999999999999999999, a code has fewer digits",
        "NVRM: Xid (PCI:0000:66:00): " + "9" * 5000,
        "NVRM: Xid (PCI:0000:66:00): ٧٩, not ASCII digits",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "",
    ],
)
def test_other_lines_are_ignored(text: str) -> None:
    assert read_xid_line(text) is None


@pytest.mark.parametrize("text", ["00000000:1B:00.0", "0000:1b:00", "0000:1B:00.0", "1b:00"])
def test_one_address_has_many_spellings(text: str) -> None:
    assert read_bus(text) == BUS


def test_an_address_is_written_as_in_the_kernel_log() -> None:
    assert write_bus(BUS) == "PCI:0000:1b:00"


@pytest.mark.parametrize("text", ["", "GPU-1", "a:b:c:d", "1b"])
def test_an_invalid_address_is_ignored(text: str) -> None:
    assert read_bus(text) is None
