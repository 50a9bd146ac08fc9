"""The tables of fields match the records, the units and dcgm-exporter's own list."""

import re
from typing import get_args, get_type_hints

import pytest
from msgspec import structs

from gpuledger_agent.exposition.dcgm_fields import (
    MULTI_SERIES,
    Field,
    Kind,
    all_fields,
    find_field,
    is_dcgm_name,
    nearest_name,
)
from gpuledger_agent.exposition.device import DERIVED, GpuEventHistory, ShownDevice
from gpuledger_agent.exposition.families import (
    INFO_FAMILIES,
    InfoFamily,
    NativeFamily,
    native_families,
)
from gpuledger_agent.settings import Profile
from tests.tables import for_each

# Enabled lines of dcgm-exporter's etc/default-counters.csv and etc/dcp-metrics-included.csv.
DEFAULTS = """
DCGM_FI_DEV_SM_CLOCK DCGM_FI_DEV_MEM_CLOCK DCGM_FI_DEV_MEMORY_TEMP DCGM_FI_DEV_GPU_TEMP
DCGM_FI_DEV_POWER_USAGE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION DCGM_FI_PROF_PCIE_TX_BYTES
DCGM_FI_PROF_PCIE_RX_BYTES DCGM_FI_DEV_PCIE_REPLAY_COUNTER DCGM_FI_DEV_GPU_UTIL
DCGM_FI_DEV_MEM_COPY_UTIL DCGM_FI_DEV_ENC_UTIL DCGM_FI_DEV_DEC_UTIL DCGM_FI_DEV_XID_ERRORS
DCGM_FI_DEV_FB_FREE DCGM_FI_DEV_FB_USED DCGM_FI_DEV_FB_RESERVED
DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL DCGM_FI_DEV_VGPU_LICENSE_STATUS
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS
DCGM_FI_DEV_ROW_REMAP_FAILURE DCGM_FI_DRIVER_VERSION DCGM_FI_PROF_GR_ENGINE_ACTIVE
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE DCGM_FI_PROF_DRAM_ACTIVE
"""
# Lines of the same files that are commented out.
OTHERS = """
DCGM_FI_DEV_POWER_VIOLATION DCGM_FI_DEV_THERMAL_VIOLATION DCGM_FI_DEV_SYNC_BOOST_VIOLATION
DCGM_FI_DEV_BOARD_LIMIT_VIOLATION DCGM_FI_DEV_LOW_UTIL_VIOLATION
DCGM_FI_DEV_RELIABILITY_VIOLATION DCGM_EXP_CLOCK_EVENTS_COUNT DCGM_EXP_XID_ERRORS_COUNT
DCGM_EXP_GPU_HEALTH_STATUS DCGM_EXP_P2P_STATUS DCGM_FI_DEV_ECC_SBE_VOL_TOTAL
DCGM_FI_DEV_ECC_DBE_VOL_TOTAL DCGM_FI_DEV_ECC_SBE_AGG_TOTAL DCGM_FI_DEV_ECC_DBE_AGG_TOTAL
DCGM_FI_DEV_RETIRED_SBE DCGM_FI_DEV_RETIRED_DBE DCGM_FI_DEV_RETIRED_PENDING
DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL
DCGM_FI_DEV_NVLINK_BANDWIDTH_L0 DCGM_FI_NVML_VERSION DCGM_FI_DEV_BRAND DCGM_FI_DEV_SERIAL
DCGM_FI_DEV_OEM_INFOROM_VER DCGM_FI_DEV_ECC_INFOROM_VER DCGM_FI_DEV_POWER_INFOROM_VER
DCGM_FI_DEV_INFOROM_IMAGE_VER DCGM_FI_DEV_VBIOS_VERSION DCGM_FI_PROF_SM_ACTIVE
DCGM_FI_PROF_SM_OCCUPANCY DCGM_FI_PROF_PIPE_FP64_ACTIVE DCGM_FI_PROF_PIPE_FP32_ACTIVE
DCGM_FI_PROF_PIPE_FP16_ACTIVE
"""


def parts() -> dict[str, type]:
    """Return the record type of each part of a device."""
    hints = get_type_hints(ShownDevice)
    return {
        name: next(part for part in get_args(hint) or (hint,) if part is not type(None))
        for name, hint in hints.items()
    }


@for_each("path", sorted({field.path for field in all_fields()}))
def test_a_path_in_the_table_leads_to_a_field_of_a_record(path: str) -> None:
    part, _, name = path.partition(".")
    if part == "derived":
        assert name in DERIVED
    elif part == "multi_series":
        assert path in MULTI_SERIES
    elif part == "events":
        assert hasattr(GpuEventHistory(), name)
    else:
        assert name in {one.name for one in structs.fields(parts()[part])}


def test_the_default_fields_are_those_of_dcgm_exporter() -> None:
    assert [field.old for field in all_fields() if field.is_default] == sorted(
        DEFAULTS.split(), key=[field.old for field in all_fields()].index
    )


@for_each("name", OTHERS.split())
def test_fields_that_dcgm_exporter_disables_can_be_enabled(name: str) -> None:
    field = find_field(name)
    assert field is not None
    assert not field.is_default


def test_no_name_belongs_to_two_fields() -> None:
    names = [name for field in all_fields() for name in {field.old, field.new}]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"DCGM_(FI|EXP)_[A-Z0-9_]+", name) for name in names)


def test_every_field_has_a_kind_and_a_help_text() -> None:
    assert {field.kind for field in all_fields()} <= set(get_args(Kind))
    assert all(field.help for field in all_fields())
    assert all(field.is_text == (field.kind == "label") for field in all_fields())


@pytest.mark.parametrize("name", ["DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"])
def test_a_field_is_found_by_its_old_and_its_new_name(name: str) -> None:
    field = find_field(name)
    assert isinstance(field, Field)
    assert field.old == "DCGM_FI_DEV_GPU_TEMP"


def test_every_dcgm_name_of_ours_exists_in_dcgm() -> None:
    assert all(is_dcgm_name(field.old) and is_dcgm_name(field.new) for field in all_fields())


@pytest.mark.parametrize(
    "name",
    [
        "DCGM_FI_DEV_ECC_DBE_VOL_L2",
        "DCGM_FI_DEV_NVLINK_RX_BANDWIDTH_L17",
        "DCGM_FI_DEV_CPU_UTIL_TOTAL",
        "DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT",
        "DCGM_FI_DEV_NVSWITCH_TEMP_CELSIUS",
        "DCGM_FI_IMEX_DOMAIN_STATUS",
        "dcgm_gpu_utilization",
    ],
)
def test_dcgms_names_are_known_even_if_we_lack_the_field(name: str) -> None:
    assert is_dcgm_name(name)
    assert find_field(name) is None


def test_a_name_that_dcgm_does_not_have_is_unknown() -> None:
    assert not is_dcgm_name("DCGM_FI_DEV_GPU_TEMPERATURE")
    assert not is_dcgm_name("# Every name of a field of DCGM")


def test_a_misspelled_name_finds_its_closest_match() -> None:
    assert nearest_name("DCGM_FI_DEV_GPU_TEMPS") == "DCGM_FI_DEV_GPU_TEMP"
    assert nearest_name("zzz") is None


def test_own_names_have_their_unit_and_no_family_is_split() -> None:
    names = [family.name for family in native_families()] + [one.name for one in INFO_FAMILIES]
    assert len(names) == len(set(names))
    families: list[NativeFamily | InfoFamily] = [*native_families(), *INFO_FAMILIES]
    for family in families:
        assert family.name.startswith(("gpuledger_node_", "gpuledger_container_"))
        assert family.profile in get_args(Profile)
        assert family.help
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert not re.search(r"percent|mib|milli|mega|_ms\b|_mb\b|kilo", family.name)
