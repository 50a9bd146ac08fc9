"""Comparing the pages of dcgm-exporter and the agent: by metric, GPU and label, with reasons."""

from collections.abc import Sequence

import pytest

from gpuledger.errors import UserError
from gpuledger_agent.dcgm_differences import KNOWN, find_reason
from gpuledger_agent.exposition.dcgm_fields import dcgm_names
from gpuledger_cli.compare.compare_command import merge_rows
from gpuledger_cli.compare.comparison import Comparison, Result, Row, are_close, tolerance_of
from gpuledger_cli.compare.dcgm_page import SeriesKey, parse_page

# In the format of dcgm-exporter 4.8.3, on a node with two GPUs, one of them with an instance.
DCGM_EXPORTER = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",pci_bus_id="00000000:07:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n1",DCGM_FI_DRIVER_VERSION="570.86.15",container="main",namespace="ml",pod="train-0"} 41
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",Hostname="n1",DCGM_FI_DRIVER_VERSION="570.86.15"} 35
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H100 80GB HBM3",Hostname="n1"} 100
# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Total energy consumption since boot (in mJ).
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a",Hostname="n1"} 1000000
# TYPE DCGM_FI_DEV_CPU_UTIL_TOTAL gauge
DCGM_FI_DEV_CPU_UTIL_TOTAL{cpu="0",Hostname="n1"} 0.5
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",Hostname="n1",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 4096
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",Hostname="n1"} 4200
"""  # noqa: E501  # as dcgm-exporter writes it
GPULEDGER = """\
# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-a",pci_bus_id="00000000:07:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",hostname="n1",DCGM_FI_DRIVER_VERSION="570.86.15",container="main",namespace="ml",pod="train-0"} 42
DCGM_FI_DEV_GPU_TEMP{gpu="1",UUID="GPU-b",pci_bus_id="00000000:0B:00.0",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",hostname="n1",DCGM_FI_DRIVER_VERSION="570.86.15"} 60
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H100 80GB HBM3",hostname="n1"} 61.5
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",modelName="NVIDIA H100 80GB HBM3",hostname="n1",gpuledger_share="pod",pod="x"} 1.5
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-a",hostname="n1"} 1000300
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",hostname="n1",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 4096
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",hostname="n1"} 1
# TYPE gpuledger_node_gpu_busy_ratio gauge
gpuledger_node_gpu_busy_ratio{gpu_uuid="GPU-a"} 0.5
"""  # noqa: E501  # as the agent writes it


def compared(theirs: str, ours: str) -> list[Row]:
    comparison = Comparison()
    comparison.add(parse_page(theirs, url="a"), parse_page(ours, url="b"))
    return list(comparison.rows())


def test_each_series_and_each_label_that_differs_has_a_row_with_its_reason() -> None:
    rows = compared(DCGM_EXPORTER, GPULEDGER)
    results = {
        (row.metric.removeprefix("DCGM_FI_DEV_"), row.gpu, row.part): (
            row.result,
            row.is_unexplained,
        )
        for row in rows
        if row.result is not Result.LABEL
    }
    assert results == {
        ("GPU_TEMP", "GPU-a", ""): (Result.SAME, False),
        ("GPU_TEMP", "GPU-b", ""): (Result.VALUE, True),
        ("GPU_UTIL", "GPU-a", ""): (Result.VALUE, True),
        ("TOTAL_ENERGY_CONSUMPTION", "GPU-a", ""): (Result.SAME, False),
        ("CPU_UTIL_TOTAL", "", "cpu=0"): (Result.NOT_IN_GPULEDGER, False),
        ("FB_USED", "GPU-b", "GPU_I_ID=7"): (Result.SAME, False),
        ("FB_USED", "GPU-b", ""): (Result.NOT_IN_GPULEDGER, False),
        ("FB_FREE", "GPU-a", ""): (Result.NOT_IN_DCGM_EXPORTER, False),
    }
    labels = {(row.dcgm_exporter, row.gpuledger) for row in rows if row.result is Result.LABEL}
    assert labels == {('Hostname="n1"', "no Hostname"), ("no hostname", 'hostname="n1"')}
    assert all(row.reason for row in rows if row.result is Result.LABEL)


def test_a_page_compared_with_itself_has_no_differences() -> None:
    for page in (DCGM_EXPORTER, GPULEDGER):
        assert {row.result for row in compared(page, page)} == {Result.SAME}


def test_new_names_of_dcgm_are_compared_with_old_ones() -> None:
    new = GPULEDGER.replace("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS")
    assert {row.result for row in compared(GPULEDGER, new)} == {Result.SAME}


def test_a_value_that_changed_differs_because_dcgm_exporter_repeats_its_values() -> None:
    comparison = Comparison()
    ours = parse_page(GPULEDGER, url="b")
    comparison.add(ours, ours)
    comparison.add(
        parse_page(GPULEDGER.replace("} 42", "} 90"), url="a"),
        parse_page(GPULEDGER.replace("} 42", "} 120"), url="b"),
    )
    both = [row for row in comparison.rows() if row.result is Result.VALUE]
    assert both == []  # the means 66 and 81 are in the ranges 42 to 90 and 42 to 120
    assert find_reason("value", "DCGM_FI_DEV_GPU_TEMP", {"followed"})
    assert not find_reason("value", "DCGM_FI_DEV_GPU_TEMP")


@pytest.mark.parametrize(
    ("metric", "theirs", "ours", "is_close"),
    [
        ("DEV_GPU_TEMP", [40], [42], True),
        ("DEV_GPU_TEMP", [40], [43], False),
        ("PROF_SM_ACTIVE", [0.5], [0.52], True),
        ("PROF_SM_ACTIVE", [0.5], [0.53], False),
        ("PROF_NVDEC0_ACTIVE", [0.5], [0.53], False),
        ("DEV_ENC_UTIL", [0], [1], True),
        ("DEV_FB_USED", [0], [1], True),
        ("DEV_FB_USED", [1000], [1050], True),
        ("DEV_FB_USED", [1000], [1060], False),
        ("DEV_POWER_USAGE", [10, 90], [50], True),
        ("DEV_POWER_USAGE", [10, 20], [24, 90], False),
        ("DEV_POWER_USAGE", [0, 700], [0], False),
        ("DEV_POWER_USAGE", [0], [0], True),
        ("DEV_XID_ERRORS", [94], [95], False),
        ("DEV_XID_ERRORS", [31, 31, 79], [79, 79, 31], False),
        ("DEV_XID_ERRORS", [31, 31, 79], [31, 79, 79], True),
        ("DEV_ECC_DBE_VOL_TOTAL", [0], [2], False),
        ("DEV_ECC_DBE_VOL_TOTAL", [0, 0, 5], [0, 3, 5], False),
        ("DEV_CORRECTABLE_REMAPPED_ROWS", [3], [1], False),
        ("DEV_CLOCK_THROTTLE_REASONS", [4], [5], False),
        ("DEV_PSTATE", [0], [2], False),
        ("DEV_PSTATE", [2], [2], True),
    ],
)
def test_measured_values_are_the_same_with_a_tolerance_and_codes_and_counts_without(
    metric: str, theirs: Sequence[float], ours: Sequence[float], *, is_close: bool
) -> None:
    tolerance = tolerance_of(f"DCGM_FI_{metric}")
    assert are_close(theirs, ours, tolerance) == is_close
    assert are_close(ours, theirs, tolerance) == is_close


@pytest.mark.parametrize(
    ("metric", "theirs", "ours", "words"),
    [
        ("DEV_GPU_UTIL", [100, 100], [0, 0], ""),
        ("DEV_GPU_UTIL", [100, 100], [0, 5], ""),
        ("DEV_GPU_UTIL", [0, 100, 100], [40, 40, 40], "mean of its sampling interval"),
        ("DEV_POWER_USAGE", [0, 700, 700], [0, 0, 0], ""),
        ("DEV_POWER_USAGE", [700, 0, 0], [700, 700, 700], ""),
        ("DEV_POWER_USAGE", [0, 700, 0], [0, 0, 0], ""),
        ("DEV_POWER_USAGE", [0, 0, 700], [700, 700, 700], "repeats a value"),
        ("DEV_POWER_USAGE", [0, 0, 0], [0, 700, 700], "repeats a value"),
        ("DEV_ECC_DBE_VOL_TOTAL", [2, 2], [0, 0], ""),
        ("DEV_XID_ERRORS", [95, 95], [94, 94], ""),
        ("DEV_XID_ERRORS", [95, 95], [0, 0], "since its own start"),
    ],
)
def test_a_difference_is_explained_only_if_the_values_fit_the_reason(
    metric: str, theirs: Sequence[float], ours: Sequence[float], words: str
) -> None:
    comparison = Comparison()
    for pair in zip(theirs, ours, strict=True):
        comparison.add(
            *(parse_page(f'DCGM_FI_{metric}{{UUID="GPU-a"}} {one}\n', url="a") for one in pair)
        )
    (row,) = comparison.rows()
    assert row.result is Result.VALUE
    assert (words in row.reason) if words else row.is_unexplained


@pytest.mark.parametrize(
    ("theirs", "ours", "is_unexplained"),
    [
        (("a",), ("b",), True),
        (("a",), ("",), False),
        (("",), ("a",), False),
        (("a", "a"), ("a", "b"), False),
    ],
)
def test_two_pods_on_one_device_are_a_difference_without_a_reason_unless_the_pod_changes(
    theirs: Sequence[str], ours: Sequence[str], *, is_unexplained: bool
) -> None:
    comparison = Comparison()
    for pair in zip(theirs, ours, strict=True):
        comparison.add(
            *(
                parse_page(f'DCGM_FI_DEV_GPU_TEMP{{UUID="GPU-a",pod="{pod}"}} 1\n', url="a")
                for pod in pair
            )
        )
    labels = [row for row in comparison.rows() if row.result is Result.LABEL]
    assert [row.is_unexplained for row in labels] == [is_unexplained]


def test_a_series_that_one_page_seldom_has_is_not_the_same_and_its_scrapes_are_counted() -> None:
    other = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-a"} 1\n'
    both = other + 'DCGM_FI_DEV_FB_FREE{UUID="GPU-a"} 1\n'
    comparison = Comparison()
    for number in range(24):
        pages = (both, other if number else both)
        comparison.add(*(parse_page(page, url="a") for page in pages))
    (rare,) = [row for row in comparison.rows() if row.result is not Result.SAME]
    assert (rare.dcgm_exporter, rare.gpuledger) == ("1", "1, in 1 of 24 scrapes")
    assert rare.is_unexplained


def test_a_missing_profiling_metric_is_explained_by_the_list_if_the_agent_has_others() -> None:
    theirs = 'DCGM_FI_PROF_SM_ACTIVE{UUID="GPU-a"} 0.5\nDCGM_FI_DEV_GPU_TEMP{UUID="GPU-a"} 1\n'
    ours = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-a"} 1\n'
    (missing,) = [row for row in compared(theirs, ours) if row.result is Result.NOT_IN_GPULEDGER]
    assert "Hopper" in missing.reason
    ours += 'DCGM_FI_PROF_DRAM_ACTIVE{UUID="GPU-a"} 0.5\n'
    (missing,) = [row for row in compared(theirs, ours) if row.result is Result.NOT_IN_GPULEDGER]
    assert "counters_file" in missing.reason


def test_a_metric_that_only_one_gpu_lacks_is_unexplained() -> None:
    one = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-a"} 1\n'
    two = one + 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-b"} 1\n'
    (missing,) = [row for row in compared(two, one) if row.result is Result.NOT_IN_GPULEDGER]
    assert missing.is_unexplained


def test_a_field_that_dcgm_exporter_lacks_only_for_one_gpu_is_not_missing_in_its_list() -> None:
    one = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-a"} 1\n'
    other_gpu = one + 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-b"} 1\n'
    other_field = one + 'DCGM_FI_DEV_FB_FREE{UUID="GPU-a"} 1\n'
    reasons = [
        row.reason
        for ours in (other_gpu, other_field)
        for row in compared(one, ours)
        if row.result is Result.NOT_IN_DCGM_EXPORTER
    ]
    assert ["list" in reason for reason in reasons] == [False, True]


def test_of_the_copies_for_pods_only_the_device_or_the_first_counts() -> None:
    page = parse_page(
        'DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="x"} 1\n'
        'DCGM_FI_DEV_FB_USED{UUID="GPU-a",pod="y"} 2\n'
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a",pod="x"} 1\n'
        'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-a"} 3\n',
        url="a",
    )
    assert {key.metric: shown.value for key, shown in page.series.items()} == {
        "DCGM_FI_DEV_FB_USED": 1,
        "DCGM_FI_DEV_GPU_UTIL": 3,
    }


def test_series_of_one_field_are_distinguished_by_xid_and_link() -> None:
    page = parse_page(
        'DCGM_FI_PROF_NVLINK_TX_BYTES{gpu_uuid="GPU-a",nvlink="0"} 1\n'
        'DCGM_EXP_XID_ERRORS_COUNT{UUID="GPU-a",xid="79"} 1\n'
        'DCGM_EXP_XID_ERRORS_COUNT{UUID="GPU-a",xid="13"} 2\n',
        url="a",
    )
    assert set(page.series) == {SeriesKey("DCGM_FI_PROF_NVLINK_TX_BYTES", "GPU-a", "nvlink=0")} | {
        SeriesKey("DCGM_EXP_XID_ERRORS_COUNT", "GPU-a", f"xid={xid}") for xid in (79, 13)
    }


def test_a_page_that_is_not_of_metrics_is_an_error_with_its_address() -> None:
    with pytest.raises(UserError, match="http://a: not a page"):
        parse_page("<html>\n", url="http://a")


def test_the_table_has_a_line_for_a_metric_of_all_gpus_and_for_a_label_of_all_series() -> None:
    rows = [row for row in compared(DCGM_EXPORTER, GPULEDGER) if row.result is not Result.SAME]
    lines = list(merge_rows(rows))
    assert lines[0][:3] == ("DCGM_FI_DEV_GPU_TEMP", "GPU-b", "value differs")
    assert lines[0][-1] == "unknown"
    labels = [line for line in lines if line[2] == "label differs"]
    assert [line[:2] for line in labels] == [("4 metrics", "2 GPUs")] * 2


def test_each_known_difference_names_existing_metrics() -> None:
    from fnmatch import filter as matching  # noqa: PLC0415  # shadows the built-in function

    names = dcgm_names()
    for known in KNOWN:
        if known.kind != "label":
            assert all(matching(names, name) for name in known.names), known
