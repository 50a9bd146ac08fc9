"""A node's hardware and configuration, published when it changes, and again every hour.

This module holds the record of `gpuledger.inventory.v1`, a compacted topic keyed by node.
"""

from typing import Annotated

from gpuledger.records.base import BaseRecord, BootId, ClusterName, Natural, NodeName, SmallNatural
from gpuledger.records.bounds import (
    MAX_CAPABILITIES,
    MAX_GPUS,
    Id,
    Milliwatts,
    Sentence,
    Word,
    at_most,
)


class Capability(BaseRecord, frozen=True, kw_only=True):
    """Whether a GPU's driver supports one NVML call; the agent has tried the call."""

    call: Word
    """The NVML function, with its argument after a colon if one function returns many values, such
    as `nvmlDeviceGetFieldValues:82`."""
    supported: bool
    """Whether the driver supports it."""
    reason: Sentence | None = None
    """If it does not: the driver's error, such as `NotSupported` or `NoPermission`."""


class MigInstance(BaseRecord, frozen=True, kw_only=True):
    """One MIG instance in a GPU's current layout."""

    uuid: Id
    """The driver's UUID of the instance, `MIG-…`."""
    gpu_instance: SmallNatural
    """The driver's id of the GPU instance."""
    compute_instance: SmallNatural
    """The driver's id of the compute instance."""
    profile: Word | None = None
    """Its profile, such as `1g.10gb`."""
    gpu_slices: SmallNatural | None = None
    """Compute slices of the GPU instance."""
    compute_slices: SmallNatural | None = None
    """The part of these slices that the compute instance has."""
    placement_start: SmallNatural | None = None
    """Start of the GPU instance on the GPU, in memory slices. Names of devices that are allocated
    by resource claims end with this number."""
    multiprocessors: SmallNatural | None = None
    """Streaming multiprocessors of the compute instance."""
    memory_total_bytes: Natural | None = None
    """Device memory of the GPU instance."""


class GpuFacts(BaseRecord, frozen=True, kw_only=True):
    """One GPU with its hardware and configuration."""

    uuid: Id
    """Its identity."""
    index: SmallNatural
    """The driver's current index of the GPU."""
    # Not always the index: NVML numbers GPUs by bus order.
    minor_number: SmallNatural | None = None
    """Number of its device file, `/dev/nvidia<n>`."""
    model: Word | None = None
    """The product name."""
    brand: Word | None = None
    """The product line, such as `Nvidia` or `Tesla`."""
    architecture: Word | None = None
    """The chip's architecture, such as `hopper`."""
    compute_capability: Word | None = None
    """CUDA compute capability of the chip, such as `9.0`."""
    serial: Word | None = None
    """The board's serial number."""
    pci_bus_id: Word | None = None
    """PCI address, such as `00000000:1B:00.0`."""
    vbios_version: Word | None = None
    """Version of the board's firmware."""
    inforom_image_version: Word | None = None
    """Version of the InfoROM, the board's store of configuration and errors."""
    inforom_oem_version: Word | None = None
    """Version of the InfoROM's OEM object."""
    inforom_ecc_version: Word | None = None
    """Version of the InfoROM's ECC object."""
    inforom_power_version: Word | None = None
    """Version of the InfoROM's power object."""
    memory_total_bytes: Natural | None = None
    """Size of the device memory."""
    pcie_max_link_generation: SmallNatural | None = None
    """The highest PCIe generation that card and slot support."""
    pcie_max_link_width: SmallNatural | None = None
    """The most PCIe lanes that card and slot support."""
    ecc_enabled: bool | None = None
    """Whether memory errors are corrected."""
    persistence_enabled: bool | None = None
    """Whether the driver keeps the GPU initialized when nothing uses it."""
    accounting_enabled: bool | None = None
    """Whether the driver's accounting of processes is on."""
    compute_mode: Word | None = None
    """`default`, `exclusive_process` or `prohibited`."""
    power_limit_milliwatts: Milliwatts | None = None
    """The power limit in force: the lowest of all that are set."""
    fabric_cluster_uuid: Word | None = None
    """The NVLink fabric that it has joined, equal for all GPUs of a fabric; absent before that."""
    fabric_clique_id: Natural | None = None
    """The part of the fabric in which GPUs reach each other; absent before it has joined."""
    chassis_serial_number: Word | None = None
    """Serial number of the chassis of a rack whose GPUs form one fabric. Only such machines report
    this and the position in the rack."""
    chassis_slot: SmallNatural | None = None
    """Slot in the chassis, counting slots of switches."""
    chassis_tray: SmallNatural | None = None
    """Tray in the chassis, counting only compute trays."""
    chassis_host: SmallNatural | None = None
    """Number of the machine within the slot."""
    module_id: SmallNatural | None = None
    """Number of the GPU within the machine, by its position."""
    mig_enabled: bool | None = None
    """Whether it is partitioned into instances; absent if it cannot be."""
    instances: Annotated[list[MigInstance], at_most(MAX_GPUS)]
    """Its MIG instances."""
    nvlink_peers: Annotated[dict[Id, Word], at_most(MAX_GPUS)] | None = None
    """NVLink status of each other GPU of the node, by its UUID: `ok` or NVML's reason."""
    capabilities: Annotated[list[Capability], at_most(MAX_CAPABILITIES)]
    """Calls that its driver supports, and calls that it does not."""


class Inventory(BaseRecord, frozen=True, kw_only=True):
    """The GPUs of a node; published when something about them changes, and again every hour."""

    cluster: ClusterName
    """Cluster name, as set for its agents and podwatch; other names are unique only within it."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    time_ns: Natural
    """When this was found, nanoseconds since the epoch."""
    driver_version: Word | None = None
    """Version of the kernel driver."""
    nvml_version: Word | None = None
    """Version of the NVML library."""
    cuda_driver_version: Word | None = None
    """The newest CUDA version that the driver supports, such as `13.0`."""
    confidential_computing_mode: Word | None = None
    """`off`, `on`, or `devtools`: on, but open to debuggers, so nothing is confidential. Absent if
    the GPUs do not support it."""
    confidential_link_mode: Word | None = None
    """How GPUs communicate in this mode: `none`, `protected_pcie` or `nvlink_encryption`."""
    gpus: Annotated[list[GpuFacts], at_most(MAX_GPUS)]
    """All GPUs that the driver has found. A GPU whose facts could not be read yet has only its UUID
    and index."""
