"""What a node is built of: what does not change from tick to tick, told again when it did.

Here lives the record of `gpuledger.inventory.v1`, a compacted topic keyed by node.
"""

from gpuledger.records.base import BootId, Natural, NodeName, SmallNatural, record


@record
class Capability:
    """Whether a GPU's driver answers one call, found by asking it."""

    call: str
    """NVML's name of the function, with its argument behind a colon where one function has many
    answers, such as `nvmlDeviceGetFieldValues:82`."""
    supported: bool
    """Whether it answers."""
    reason: str | None = None
    """Where it does not: the driver's error, such as `NotSupported` or `NoPermission`."""


@record
class MigInstance:
    """One MIG instance of a GPU, as its layout is now."""

    uuid: str
    """The driver's UUID of it, `MIG-…`."""
    gpu_instance: SmallNatural
    """The driver's id of the GPU instance."""
    compute_instance: SmallNatural
    """The driver's id of the compute instance."""
    profile: str | None = None
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


@record
class GpuFacts:
    """One GPU and what is built into it or set on it."""

    uuid: str
    """Its identity."""
    index: SmallNatural
    """The driver's index of it now."""
    minor_number: SmallNatural | None = None
    """The number in its device file, `/dev/nvidia<n>`."""
    model: str | None = None
    """The product name."""
    brand: str | None = None
    """The product line, such as `Nvidia` or `Tesla`."""
    architecture: str | None = None
    """Such as `hopper`."""
    compute_capability: str | None = None
    """CUDA's version of the chip, such as `9.0`."""
    serial: str | None = None
    """The board's serial number."""
    pci_bus_id: str | None = None
    """Where it is plugged in, such as `00000000:1B:00.0`."""
    vbios_version: str | None = None
    """The board's firmware."""
    inforom_image_version: str | None = None
    """The board's store of facts and errors."""
    inforom_oem_version: str | None = None
    """The OEM object in it."""
    inforom_ecc_version: str | None = None
    """The ECC object in it."""
    inforom_power_version: str | None = None
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
    compute_mode: str | None = None
    """`default`, `exclusive_process` or `prohibited`."""
    mig_enabled: bool | None = None
    """Whether it is cut into instances; absent where it cannot be."""
    instances: list[MigInstance]
    """Its MIG instances."""
    nvlink_peers: dict[str, str] | None = None
    """Whether NVLink reaches each other GPU of the node, by its UUID: `ok` or NVML's reason."""
    capabilities: list[Capability]
    """What its driver answers and what not."""


@record
class Inventory:
    """One node's GPUs at a time at which something of them had changed."""

    node: NodeName
    """The node's name in Kubernetes."""
    boot_id: BootId
    """The kernel's id of this boot."""
    time_ns: Natural
    """When it was found so, nanoseconds since the epoch."""
    driver_version: str | None = None
    """The kernel driver's version."""
    nvml_version: str | None = None
    """The library's version."""
    cuda_driver_version: str | None = None
    """The newest CUDA that the driver can run, such as `13.0`."""
    gpus: list[GpuFacts]
    """The GPUs that answered."""
