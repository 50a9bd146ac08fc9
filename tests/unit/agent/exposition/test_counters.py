"""A list of counters in dcgm-exporter's format is read, and its errors are reported."""

from pathlib import Path

import pytest
import structlog
from prometheus_client import REGISTRY

from gpuledger.errors import UserError
from gpuledger_agent.exposition.dcgm_fields import (
    Skipped,
    default_counters,
    parse_counters,
    read_counters,
)
from tests.errors import has_words

LIST = """\
# Format
# If line starts with a '#' it is considered a comment
  # so it is here

DCGM_FI_DEV_SM_CLOCK,  gauge, SM clock frequency (in MHz).
DCGM_FI_DEV_GPU_TEMP_CELSIUS, counter, "Hot, or not."
DCGM_FI_DEV_SERIAL, label, Serial
DCGM_FI_DEV_FB_TOTAL, label, Size
DCGM_FI_DEV_FB_USED , untyped, Used
DCGM_FI_DEV_FB_FREE, summary, Free
"""


def refuse(line: Skipped) -> None:
    pytest.fail(f"{line} was skipped")


def test_a_list_has_field_kind_and_help() -> None:
    found = [
        (counter.name, counter.field.old, counter.kind, counter.help)
        for counter in parse_counters(LIST.splitlines(), name="x", skip=refuse)
    ]
    assert found == [
        (*2 * ("DCGM_FI_DEV_SM_CLOCK",), "gauge", "SM clock frequency (in MHz)."),
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "DCGM_FI_DEV_GPU_TEMP", "counter", "Hot, or not."),
        (*2 * ("DCGM_FI_DEV_SERIAL",), "label", "Serial"),
        (*2 * ("DCGM_FI_DEV_FB_TOTAL",), "label", "Size"),
        (*2 * ("DCGM_FI_DEV_FB_USED",), "untyped", "Used"),
        (*2 * ("DCGM_FI_DEV_FB_FREE",), "untyped", "Free"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("DCGM_FI_DEV_SM_CLOCK, gauge", "expected 3 columns (field, type, help), got 2"),
        (
            "DCGM_FI_DEV_SM_CLOCK, gauge, a, b",
            "got 4; put a help text with commas in double quotes",
        ),
        ("DCGM_FI_DEV_SM_CLOCK, speed, a", "expected one of gauge, counter, label, untyped, got"),
        ("nonsense, gauge, a", "not the name of a DCGM field: 'nonsense'"),
        ("dcgm_fi_dev_sm_clock, gauge, a", "not the name of a DCGM field: 'dcgm_fi"),
        ("n" * 3000 + ", gauge, a", f"not the name of a DCGM field: '{'n' * 80}…'"),
        ("a, " + "g" * 3000 + ", b", f"got '{'g' * 80}…'"),
        ("DCGM_FI_DEV_CPU_UTIL_TOTAL, speed, a", "expected one of gauge, counter, label"),
        ('DCGM_FI_DEV_SM_CLOCK, gauge, "a', "unexpected end of data"),
    ],
)
def test_a_bad_line_is_reported_with_file_line_and_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    file = tmp_path / "counters.csv"
    file.write_text(f"# comment\n\n{line}\n")
    with pytest.raises(UserError) as caught:
        read_counters(file)
    assert str(caught.value).startswith(f"{file}:3: ")
    assert reason in str(caught.value)


def test_a_line_of_dcgm_exporter_without_effect_is_logged_counted_and_skipped(
    tmp_path: Path,
) -> None:
    file = tmp_path / "counters.csv"
    file.write_text(
        "DCGM_FI_DEV_CPU_UTIL_TOTAL, gauge, CPU\n"
        "DCGM_FI_DEV_GPU_TEMP, gauge, Temperature\n"
        "# A comment\n"
        "DCGM_FI_DEV_SM_CLOK, gauge, Misspelled\n"
        "DCGM_FI_DEV_SM_CLOCK_HERTZ, gauge, A name of DCGM 4.6.1\n"
        "dcgm_fb_used, gauge, Name of dcgm-exporter 1.x\n"
        "DCGM_FI_DEV_GPU_TEMP, gauge, Temperature\n"
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, The new name of the same field\n"
        "DCGM_FI_DEV_SERIAL, gauge, Serial\n"
        "DCGM_EXP_XID_ERRORS_COUNT, label, XIDs\n"
    )
    with structlog.testing.capture_logs() as logs:
        found = read_counters(file)
    assert [one.name for one in found] == ["DCGM_FI_DEV_GPU_TEMP"]
    (logged,) = logs
    assert (logged["event"], logged["log_level"]) == ("counters_skipped", "warning")
    assert logged["file"] == str(file)
    assert logged["lines"] == [
        "1: DCGM_FI_DEV_CPU_UTIL_TOTAL: not supported",
        "4: DCGM_FI_DEV_SM_CLOK: unknown, similar to DCGM_FI_DEV_SM_CLOCK",
        "5: DCGM_FI_DEV_SM_CLOCK_HERTZ: unknown, similar to DCGM_FI_DEV_SM_CLOCK",
        "6: dcgm_fb_used: not supported",
        "7: DCGM_FI_DEV_GPU_TEMP: the same field as in line 2",
        "8: DCGM_FI_DEV_GPU_TEMP_CELSIUS: the same field as in line 2",
        "9: DCGM_FI_DEV_SERIAL: has a text value; set its type to label",
        "10: DCGM_EXP_XID_ERRORS_COUNT: has several values; its type cannot be label",
    ]
    assert REGISTRY.get_sample_value("gpuledger_agent_counters_skipped") == 8


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=has_words("exposition.counters_file", "absent")):
        read_counters(tmp_path / "absent")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, check=has_words("UTF-8")):
        read_counters(tmp_path / "bytes")


def test_without_a_list_the_defaults_are_shown() -> None:
    assert "DCGM_FI_DEV_GPU_UTIL" in {counter.field.old for counter in default_counters()}
    assert "DCGM_FI_DEV_POWER_VIOLATION" not in {one.field.old for one in default_counters()}
