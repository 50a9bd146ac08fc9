"""What is built into a GPU or set on it. What never changes is asked once.

The layout of MIG instances is known elsewhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pynvml as nvml

from agent.nvml.asking import Asker
from agent.nvml.calls import FailedError, UnsupportedError, call_nvml
from agent.nvml.capabilities import capabilities_of
from gpuledger.records import GpuFacts

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
_MOST: Final = 2**31 - 1


class Facts:
    """The facts of one GPU."""

    def __init__(
        self, asker: Asker, *, uuid: str, index: int, peers: Sequence[tuple[str, Any]]
    ) -> None:
        """`peers` are the node's other GPUs as pairs of UUID and handle."""
        self._asker = asker
        self._uuid = uuid
        self._index = index
        self._peers = peers
        self._built_in: dict[str, Any] | None = None

    def ask(self) -> GpuFacts:
        """Give the facts as they are now, without the MIG layout; raises NvmlLostError."""
        if self._built_in is None:
            self._built_in = _built_in(self._asker) | {
                "nvlink_peers": _nvlink_peers(self._asker, self._peers)
            }
        return GpuFacts(
            uuid=self._uuid,
            index=self._index,
            **self._built_in,
            **_settings(self._asker),
            instances=[],
            capabilities=capabilities_of(self._asker.outcomes),
        )


def _built_in(asker: Asker) -> dict[str, Any]:
    ask = asker.ask
    memory = ask("nvmlDeviceGetMemoryInfo", nvml.nvmlMemory_v2)
    pci = ask("nvmlDeviceGetPciInfo_v3")
    return {
        "minor_number": _small(ask("nvmlDeviceGetMinorNumber")),
        "model": ask("nvmlDeviceGetName"),
        "brand": _BRANDS.get(ask("nvmlDeviceGetBrand")),
        "architecture": _ARCHITECTURES.get(ask("nvmlDeviceGetArchitecture")),
        "compute_capability": _version(ask("nvmlDeviceGetCudaComputeCapability")),
        "serial": ask("nvmlDeviceGetSerial"),
        "pci_bus_id": pci and _text(pci.busId),
        "vbios_version": ask("nvmlDeviceGetVbiosVersion"),
        "inforom_image_version": ask("nvmlDeviceGetInforomImageVersion"),
        "inforom_oem_version": ask("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_OEM),
        "inforom_ecc_version": ask("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_ECC),
        "inforom_power_version": ask("nvmlDeviceGetInforomVersion", nvml.NVML_INFOROM_POWER),
        "memory_total_bytes": memory and memory.total,
        "pcie_max_link_generation": _small(ask("nvmlDeviceGetMaxPcieLinkGeneration")),
        "pcie_max_link_width": _small(ask("nvmlDeviceGetMaxPcieLinkWidth")),
    }


def _settings(asker: Asker) -> dict[str, Any]:
    ask = asker.ask
    ecc = ask("nvmlDeviceGetEccMode")
    return {
        "ecc_enabled": ecc and _flag(ecc[0]),
        "persistence_enabled": _flag(ask("nvmlDeviceGetPersistenceMode")),
        "accounting_enabled": _flag(ask("nvmlDeviceGetAccountingMode")),
        "compute_mode": _COMPUTE_MODES.get(ask("nvmlDeviceGetComputeMode")),
    }


def _nvlink_peers(asker: Asker, peers: Sequence[tuple[str, Any]]) -> dict[str, str] | None:
    """Give what the driver says of each other GPU; not remembered as a call that is refused."""
    given = {}
    for uuid, handle in peers:
        try:
            status = call_nvml(
                asker.library,
                "nvmlDeviceGetP2PStatus",
                asker.handle,
                handle,
                nvml.NVML_P2P_CAPS_INDEX_NVLINK,
            )
        except (UnsupportedError, FailedError):
            continue
        given[uuid] = _PEER_STATUSES.get(status, "unknown")
    return given or None


def ask_versions(library: Any) -> Mapping[str, str | None]:  # noqa: ANN401  # pynvml is untyped
    """Give the node's versions by the fields of `Inventory`; raises NvmlLostError."""
    cuda = _of_system(library, "nvmlSystemGetCudaDriverVersion_v2")
    return {
        "driver_version": _of_system(library, "nvmlSystemGetDriverVersion"),
        "nvml_version": _of_system(library, "nvmlSystemGetNVMLVersion"),
        "cuda_driver_version": cuda and f"{cuda // 1000}.{cuda % 1000 // 10}",
    }


def _of_system(library: Any, name: str) -> Any:  # noqa: ANN401  # as the library has it
    try:
        return call_nvml(library, name)
    except (UnsupportedError, FailedError):
        return None


def _flag(value: Any) -> bool | None:  # noqa: ANN401  # as the library has it
    return bool(value) if value in (0, 1) else None


def _small(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= _MOST else None


def _version(parts: tuple[int, int] | None) -> str | None:
    return f"{parts[0]}.{parts[1]}" if parts else None


def _text(value: Any) -> str:  # noqa: ANN401  # bytes of a struct, or a friendly object's text
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
