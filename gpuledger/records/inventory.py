"""What a node is built of: what does not change from tick to tick, told again when it did.

Here lives the record of `gpuledger.inventory.v1`, a compacted topic keyed by node.
"""

from typing import Annotated

from gpuledger.records.base import BaseRecord, BootId, ClusterName, Natural, NodeName, SmallNatural
from gpuledger.records.bounds import (
    MAX_CAPABILITIES,
    MAX_GPUS,
    Id,
    Sentence,
    Word,
    at_most,
)


class Capability(BaseRecord, frozen=True, kw_only=True):
    """Whether a GPU's driver answers one call, found by asking it."""

    call: Word
    """NVML's name of the function, with its argument behind a colon where one function has many
    answers, such as `nvmlDeviceGetFieldValues:82`."""
    supported: bool
    """Whether it answers."""
    reason: Sentence | None = None
    """Where it does not: the driver's error, such as `NotSupported` or `NoPermission`."""


class MigInstance(BaseRecord, frozen=True, kw_only=True):
    """One MIG instance of a GPU, as its layout is now."""

    uuid: Id
    """The driver's UUID of it, `MIG-…`."""
    gpu_instance: SmallNatural
    """The driver's id of the GPU instance."""
    compute_instance: SmallNatural
    """The driver's id of the compute instance."""
    profile: Word | None = None
    """Its profile, such as `1g.10gb`."""
    gpu_slices: SmallNatural | None = None
    """Compute slices of the GPU instance."""
    compute_slices: SmallNatural | None = None
    """Those of them that the compute instance has."""
    placement_start: SmallNatural | None = None
    """Where the GPU instance begins on the GPU, in memory slices; names of claimed devices end in
    it."""
    multiprocessors: SmallNatural | None = None
    """Streaming multiprocessors of the compute instance."""
    memory_total_bytes: Natural | None = None
    """Device memory of the GPU instance."""


class GpuFacts(BaseRecord, frozen=True, kw_only=True):
    """One GPU and what is built into it or set on it."""

    uuid: Id
    """Its identity."""
    index: SmallNatural
    """The driver's index of it now."""
    # Not always the index: NVML counts by the order on the bus.
    minor_number: SmallNatural | None = None
    """The number in its device file, `/dev/nvidia<n>`."""
    model: Word | None = None
    """The product name."""
    brand: Word | None = None
    """The product line, such as `Nvidia` or `Tesla`."""
    architecture: Word | None = None
    """Such as `hopper`."""
    compute_capability: Word | None = None
    """CUDA's version of the chip, such as `9.0`."""
    serial: Word | None = None
    """The board's serial number."""
    pci_bus_id: Word | None = None
    """Where it is plugged in, such as `00000000:1B:00.0`."""
    vbios_version: Word | None = None
    """The board's firmware."""
    inforom_image_version: Word | None = None
    """The board's store of facts and errors."""
    inforom_oem_version: Word | None = None
    """The OEM object in it."""
    inforom_ecc_version: Word | None = None
    """The ECC object in it."""
    inforom_power_version: Word | None = None
    """The power object in it."""
    memory_total_bytes: Natural | None = None
    """Size of the device memory."""
    pcie_max_link_generation: SmallNatural | None = None
    """The PCIe generation that card and slot can do."""
    pcie_max_link_width: SmallNatural | None = None
    """The PCIe lanes that card and slot can do."""
    ecc_enabled: bool | None = None
    """Whether memory errors are corrected."""
    persistence_enabled: bool | None = None
    """Whether the driver keeps the GPU up without users."""
    accounting_enabled: bool | None = None
    """Whether the driver keeps accounts of processes."""
    compute_mode: Word | None = None
    """`default`, `exclusive_process` or `prohibited`."""
    fabric_cluster_uuid: Word | None = None
    """The NVLink fabric that it has joined, the same of all GPUs in it; absent until it has."""
    fabric_clique_id: Natural | None = None
    """The part of the fabric in which GPUs reach each other; absent as the fabric is."""
    chassis_serial_number: Word | None = None
    """Serial number of the chassis, of a rack whose GPUs are one fabric; this and where it stands
    in there are told by such machines alone."""
    chassis_slot: SmallNatural | None = None
    """Slot in the chassis, those of switches counted."""
    chassis_tray: SmallNatural | None = None
    """Tray among those of the chassis that compute."""
    chassis_host: SmallNatural | None = None
    """Number of the machine in the slot."""
    module_id: SmallNatural | None = None
    """Number of the GPU in the machine, by its place there."""
    mig_enabled: bool | None = None
    """Whether it is cut into instances; absent where it cannot be."""
    instances: Annotated[list[MigInstance], at_most(MAX_GPUS)]
    """Its MIG instances."""
    nvlink_peers: Annotated[dict[Id, Word], at_most(MAX_GPUS)] | None = None
    """Whether NVLink reaches each other GPU of the node, by its UUID: `ok` or NVML's reason."""
    capabilities: Annotated[list[Capability], at_most(MAX_CAPABILITIES)]
    """What its driver answers and what not."""


class Inventory(BaseRecord, frozen=True, kw_only=True):
    """One node's GPUs at a time at which something of them had changed."""

    cluster: ClusterName
    """The Kubernetes cluster, as its agents and podwatch are told: names are unique in it alone."""
    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    time_ns: Natural
    """When it was found so, nanoseconds since the epoch."""
    driver_version: Word | None = None
    """The kernel driver's version."""
    nvml_version: Word | None = None
    """The library's version."""
    cuda_driver_version: Word | None = None
    """The newest CUDA that the driver can run, such as `13.0`."""
    confidential_computing_mode: Word | None = None
    """`off`; `on`; or `devtools`, in which it is on and debuggers are let in, so that nothing is
    confidential. Absent where the GPUs have none."""
    confidential_link_mode: Word | None = None
    """How GPUs reach each other in it: `none`, `protected_pcie` or `nvlink_encryption`."""
    gpus: Annotated[list[GpuFacts], at_most(MAX_GPUS)]
    """The GPUs that answered."""
