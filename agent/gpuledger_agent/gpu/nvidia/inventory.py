"""Queries the facts about a GPU: its hardware, firmware and modes.

Facts that never change are queried once. `mig` provides the layout of MIG instances.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, cast
from uuid import UUID

import pynvml as nvml

from gpuledger.records import Capability, GpuFacts
from gpuledger_agent.core.readings import MEMORY_BYTES, MILLIWATTS, Unit
from gpuledger_agent.gpu.nvidia.core import query_memory
from gpuledger_agent.gpu.nvidia.device_client import (
    DeviceClient,
    Key,
    call_nvml,
    none_where_absent,
    raw_getattr,
    small_number,
)
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.protocol import FailedError, UnsupportedError


def capabilities_of(outcomes: Mapping[Key, str | None]) -> list[Capability]:
    """Return, for each call to the driver, whether it is supported; sorted by the call's name.

    `outcomes` are those of a `DeviceClient`. If a function was called with different arguments, the
    name of each call includes the arguments.
    """
    times = Counter(name for name, *_ in outcomes)
    capabilities = [
        _capability(key if times[key[0]] > 1 else key[:1], reason)
        for key, reason in outcomes.items()
    ]
    return sorted(capabilities, key=attrgetter("call"))


# Cached, because all GPUs of a node have similar capabilities, and separate records would take
# 20 KiB per GPU.
@lru_cache(maxsize=2048)
def _capability(key: Key, reason: str | None) -> Capability:
    name, *arguments = key
    call = f"{name}:{','.join(map(str, arguments))}" if arguments else str(name)
    return Capability(call=call, supported=not reason, reason=reason)


_BRANDS: Final = {
    nvml.NVML_BRAND_QUADRO: "Quadro",
    nvml.NVML_BRAND_TESLA: "Tesla",
    nvml.NVML_BRAND_NVS: "NVS",
    nvml.NVML_BRAND_GRID: "Grid",
    nvml.NVML_BRAND_GEFORCE: "GeForce",
    nvml.NVML_BRAND_TITAN: "Titan",
    nvml.NVML_BRAND_NVIDIA_VAPPS: "NvidiaVApps",
    nvml.NVML_BRAND_NVIDIA_VPC: "NvidiaVPC",
    nvml.NVML_BRAND_NVIDIA_VCS: "NvidiaVCS",
    nvml.NVML_BRAND_NVIDIA_VWS: "NvidiaVWS",
    nvml.NVML_BRAND_NVIDIA_CLOUD_GAMING: "NvidiaCloudGaming",
    nvml.NVML_BRAND_QUADRO_RTX: "QuadroRTX",
    nvml.NVML_BRAND_NVIDIA_RTX: "NvidiaRTX",
    nvml.NVML_BRAND_NVIDIA: "Nvidia",
    nvml.NVML_BRAND_GEFORCE_RTX: "GeForceRTX",
    nvml.NVML_BRAND_TITAN_RTX: "TitanRTX",
}
_ARCHITECTURES: Final = {
    nvml.NVML_DEVICE_ARCH_KEPLER: "kepler",
    nvml.NVML_DEVICE_ARCH_MAXWELL: "maxwell",
    nvml.NVML_DEVICE_ARCH_PASCAL: "pascal",
    nvml.NVML_DEVICE_ARCH_VOLTA: "volta",
    nvml.NVML_DEVICE_ARCH_TURING: "turing",
    nvml.NVML_DEVICE_ARCH_AMPERE: "ampere",
    nvml.NVML_DEVICE_ARCH_ADA: "ada",
    nvml.NVML_DEVICE_ARCH_HOPPER: "hopper",
    nvml.NVML_DEVICE_ARCH_BLACKWELL: "blackwell",
    nvml.NVML_DEVICE_ARCH_RUBIN: "rubin",
}
_COMPUTE_MODES: Final = {
    nvml.NVML_COMPUTEMODE_DEFAULT: "default",
    nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive_process",
    nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
_PEER_STATUSES: Final = {
    nvml.NVML_P2P_STATUS_OK: "ok",
    nvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "chipset_not_supported",
    nvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "gpu_not_supported",
    nvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "topology_not_supported",
    nvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "disabled_by_regkey",
    nvml.NVML_P2P_STATUS_NOT_SUPPORTED: "not_supported",
}


class Facts:
    """Queries the facts about one GPU."""

    def __init__(
        self, client: DeviceClient, *, uuid: str, index: int, peers: Sequence[tuple[str, object]]
    ) -> None:
        """Create the query for one GPU; `peers` are the UUIDs and handles of the other GPUs."""
        self._client = client
        self._uuid = uuid
        self._index = index
        self._peers = dict(peers)
        self._built_in: dict[str, Any] = {}
        self._fabric: dict[str, Any] = {}
        self._peer_statuses: dict[str, str] = {}
        self._capabilities: list[Capability] = []
        self._capabilities_version: tuple[int, int] | None = None

    def query(self) -> GpuFacts:
        """Return the GPU's facts, without the MIG layout; raises SourceLostError."""
        self._query_physical_gpu()
        self._query_rack()
        self._query_fabric()
        self._query_peers()
        query = self._client.query
        ecc = query(NvmlLibrary.nvmlDeviceGetEccMode)
        power_limit = query(NvmlLibrary.nvmlDeviceGetEnforcedPowerLimit)
        return GpuFacts(
            uuid=self._uuid,
            index=self._index,
            **self._built_in,
            **self._fabric,
            nvlink_peers=dict(self._peer_statuses) or None,
            # The first element is the current mode, the second the mode after the next reset.
            ecc_enabled=_flag(ecc[0]) if ecc else None,
            persistence_enabled=_flag(query(NvmlLibrary.nvmlDeviceGetPersistenceMode)),
            accounting_enabled=_flag(query(NvmlLibrary.nvmlDeviceGetAccountingMode)),
            compute_mode=_COMPUTE_MODES.get(query(NvmlLibrary.nvmlDeviceGetComputeMode)),
            power_limit_milliwatts=_plausible(power_limit, MILLIWATTS),
            instances=[],
            # Last, because they include the calls above.
            capabilities=self._current_capabilities(),
        )

    def _current_capabilities(self) -> list[Capability]:
        """Return the GPU's capabilities.

        If they have not changed since the last call, the result is the same list object.
        """
        version = self._client.outcomes_version
        if version != self._capabilities_version:
            self._capabilities = capabilities_of(self._client.outcomes)
            self._capabilities_version = version
        return self._capabilities

    def _query_physical_gpu(self) -> None:
        """Query the facts that never change, unless the driver has already answered or refused."""
        if self._built_in.get("memory_total_bytes") is None:
            total = query_memory(self._client).total
            self._built_in["memory_total_bytes"] = _plausible(total, MEMORY_BYTES)
        for name, call, convert in _BUILT_IN:
            if name not in self._built_in:
                answer = self._client.query_key(call)
                if answer is not None:
                    self._built_in[name] = convert(answer)
                elif self._client.is_unsupported(call):
                    self._built_in[name] = None

    def _query_rack(self) -> None:
        """Query the GPU's position in a rack, unless the driver has already answered or refused."""
        if "module_id" in self._built_in:
            return
        struct = self._client.fill(_PLATFORM, _PLATFORM_STRUCT)
        if struct is not None:
            self._built_in |= _rack_of(struct)
        elif self._client.is_unsupported((_PLATFORM,)):
            self._built_in["module_id"] = None

    def _query_fabric(self) -> None:
        """Query the NVLink fabric that the GPU has joined.

        It is queried each time, because a GPU may join a fabric late or join another one.
        """
        struct = self._client.fill(_FABRIC, _FABRIC_STRUCT)
        # After a mere failure, keep the last answer.
        if struct is not None:
            self._fabric = _fabric_of(struct)

    def _query_peers(self) -> None:
        """Query the state of the NVLinks to each other GPU.

        A pair of GPUs for which the driver has answered or refused is not queried again. The client
        is not used: if the driver refused one pair, the client would refuse all pairs.
        """
        for uuid in list(self._peers):
            arguments = self._peers[uuid], nvml.NVML_P2P_CAPS_INDEX_NVLINK
            try:
                status = call_nvml(
                    self._client.library,
                    NvmlLibrary.nvmlDeviceGetP2PStatus,
                    self._client.handle,
                    *arguments,
                )
                self._peer_statuses[uuid] = _PEER_STATUSES.get(status, "unknown")
            except FailedError:
                continue  # queried again with the next facts
            except UnsupportedError:
                pass
            del self._peers[uuid]


def _bus_id(pci: object) -> str:
    # Decoded here, because the binding's decoding would fail all facts on invalid bytes.
    return str(raw_getattr(pci, "busId").decode(errors="replace"))


_PLATFORM: Final = "nvmlDeviceGetPlatformInfo"
# The first version is not used: its fields had other meanings, and only one driver branch has it.
_PLATFORM_STRUCT: Final = "c_nvmlPlatformInfo_v2_t"
_UNKNOWN_BYTE: Final = 0xFF
_FABRIC: Final = "nvmlDeviceGetGpuFabricInfoV"
_FABRIC_STRUCT: Final = "c_nvmlGpuFabricInfo_v2_t"


def _bytes_of(struct: object, name: str) -> bytes:
    """Return the bytes of a struct's field as the driver wrote them.

    Attribute access cannot be used: the binding decodes the bytes as text, which fails if they are
    not valid text, and ctypes cuts a text off at the first zero byte.
    """
    descriptor = getattr(type(struct), name)
    return bytes(cast("Any", struct))[descriptor.offset :][: descriptor.size]


def _rack_of(struct: object) -> dict[str, Any]:
    """Return a GPU's position in its rack, keyed by field of `GpuFacts`; `None` if unknown."""

    def number(name: str) -> int | None:
        value = _bytes_of(struct, name)[0]
        return None if value == _UNKNOWN_BYTE else value

    serial = _bytes_of(struct, "chassisSerialNumber").partition(b"\0")[0]
    rack: dict[str, Any] = {"module_id": number("moduleId")}
    if serial.strip():
        # Without a chassis, slot, tray and host would be meaningless zeros.
        rack["chassis_serial_number"] = serial.decode("ascii", errors="replace").strip()
        rack["chassis_slot"] = number("slotNumber")
        rack["chassis_tray"] = number("trayIndex")
        rack["chassis_host"] = number("hostId")
    return rack


def _fabric_of(struct: Any) -> dict[str, Any]:  # noqa: ANN401  # a struct of ctypes
    """Return the ids of the NVLink fabric that a GPU has joined, keyed by field of `GpuFacts`.

    Return an empty mapping if the GPU has joined no fabric, or if the fabric's id is 0, as on a
    single machine that needs no fabric.
    """
    cluster = bytes(struct.clusterUuid)
    has_joined = struct.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    if not has_joined or struct.status != nvml.NVML_SUCCESS or not any(cluster):
        return {}
    return {"fabric_cluster_uuid": str(UUID(bytes=cluster)), "fabric_clique_id": struct.cliqueId}


_BUILT_IN: Final[Sequence[tuple[str, tuple[str, *tuple[object, ...]], Callable[[Any], Any]]]] = (
    ("minor_number", ("nvmlDeviceGetMinorNumber",), small_number),
    ("model", ("nvmlDeviceGetName",), str),
    ("brand", ("nvmlDeviceGetBrand",), _BRANDS.get),
    ("architecture", ("nvmlDeviceGetArchitecture",), _ARCHITECTURES.get),
    ("compute_capability", ("nvmlDeviceGetCudaComputeCapability",), "{0[0]}.{0[1]}".format),
    ("serial", ("nvmlDeviceGetSerial",), str),
    ("pci_bus_id", ("nvmlDeviceGetPciInfo_v3",), _bus_id),
    ("vbios_version", ("nvmlDeviceGetVbiosVersion",), str),
    ("inforom_image_version", ("nvmlDeviceGetInforomImageVersion",), str),
    ("inforom_oem_version", ("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_OEM), str),
    ("inforom_ecc_version", ("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_ECC), str),
    ("inforom_power_version", ("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_POWER), str),
    ("pcie_max_link_generation", ("nvmlDeviceGetMaxPcieLinkGeneration",), small_number),
    ("pcie_max_link_width", ("nvmlDeviceGetMaxPcieLinkWidth",), small_number),
)


def query_driver_version(library: object) -> str | None:
    """Return the driver's version; `None` if the query fails. Raises `SourceLostError`."""
    return none_where_absent(lambda: call_nvml(library, NvmlLibrary.nvmlSystemGetDriverVersion))


def query_versions(library: object) -> Mapping[str, str | None]:
    """Return the node's driver versions and confidential computing modes.

    They are keyed by field of `Inventory`; unknown values are `None`. Raises `SourceLostError`.
    """
    cuda = none_where_absent(
        lambda: call_nvml(library, NvmlLibrary.nvmlSystemGetCudaDriverVersion_v2)
    )
    return {
        "driver_version": query_driver_version(library),
        "nvml_version": none_where_absent(
            lambda: call_nvml(library, NvmlLibrary.nvmlSystemGetNVMLVersion)
        ),
        # For example, 12040 means 12.4.
        "cuda_driver_version": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "confidential_computing_mode": _query_confidential_mode(library),
        "confidential_link_mode": _query_link_mode(library),
    }


_LINK_MODES: Final = {
    nvml.NVML_CC_SYSTEM_MULTIGPU_NONE: "none",
    nvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE: "protected_pcie",
    nvml.NVML_CC_SYSTEM_MULTIGPU_NVLE: "nvlink_encryption",
}


def _query_confidential_mode(library: object) -> str | None:
    state = none_where_absent(lambda: call_nvml(library, NvmlLibrary.nvmlSystemGetConfComputeState))
    if state is None:
        return None
    if state.ccFeature != nvml.NVML_CC_SYSTEM_FEATURE_ENABLED:
        return "off"
    return "devtools" if state.devToolsMode == nvml.NVML_CC_SYSTEM_DEVTOOLS_MODE_ON else "on"


def _query_link_mode(library: object) -> str | None:
    settings = nvml.c_nvmlSystemConfComputeSettings_v1_t()
    # For this function, the binding returns the driver's code instead of raising an error.
    code = none_where_absent(
        lambda: call_nvml(library, NvmlLibrary.nvmlSystemGetConfComputeSettings, byref(settings))
    )
    return _LINK_MODES.get(settings.multiGpuMode) if code == nvml.NVML_SUCCESS else None


def _plausible(value: int | None, unit: Unit) -> int | None:
    return value if value is not None and unit.low <= value <= unit.high else None


def _flag(value: int | None) -> bool | None:
    return bool(value) if value in (0, 1) else None
