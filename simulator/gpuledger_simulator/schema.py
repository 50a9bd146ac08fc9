"""What a scenario says: nodes with GPUs, pods with owners, processes with their load, what fails.

Here lives the shape of the YAML file, each field with its unit. Reading it, checking one part
against another and naming mistakes is `gpuledger_simulator.scenario.load`'s business.
"""

from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta, Struct, field

from gpuledger.records.bounds import MAX_MEMORY_BYTES
from gpuledger_simulator.drivers import DriverModel

Kind = Literal[
    "lost", "reset_required", "hang", "garbage", "not_supported", "growing_list",
    "driver_reload", "version_mismatch", "unbind", "frozen",
]  # fmt: skip


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that a node's driver does wrong for a while."""

    node: str
    """The node's name."""
    kind: Kind
    """`lost` and `reset_required`: the GPUs answer with that error, and handles that were taken
    before the end do so after it. `hang`: calls do not return. `garbage`: values that cannot be
    true. `not_supported`: calls that the driver does not know any more. `growing_list`: lists that
    grew between the two calls that it takes to read them. `driver_reload`: there is no driver, and
    afterwards all counters begin anew and no handle is good. `version_mismatch`: the library is
    not the driver's. `unbind`: the driver tells that it will be unbound, and is so as soon as
    nobody holds the library open; then as `driver_reload`. `frozen`: `calls` answer what they
    answered first in that time, as a counter of a virtual GPU that stands still."""
    gpus: list[Annotated[int, Meta(ge=0)]] = []
    """The driver's indices of the GPUs; all of them where there is none."""
    calls: list[Annotated[str, Meta(pattern="^nvml")]] = []
    """NVML's names of the functions; where there is none, all that take a GPU, and of `garbage`
    those that give a plain reading."""
    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """When it begins, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """When it ends, since the scenario's start; absent: never."""
    failures: Annotated[int, Meta(ge=1)] = 1
    """Of `growing_list`: how often a call fails before it succeeds once."""


Count = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0)]

Throttle = Literal[
    "power", "sync_boost", "software_thermal", "hardware_thermal", "power_brake", "board_limit",
    "low_utilization", "reliability",
]  # fmt: skip


class HealthFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that befalls a GPU; counts stay, the rest ends with it."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """From when on, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """Until when; absent: for ever."""
    throttle: Throttle | None = None
    """Why the clocks are held down."""
    recovery: Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"] = "none"
    """What the driver asks for."""
    ecc_corrected: Count = 0
    """Corrected memory errors."""
    ecc_uncorrected: Count = 0
    """Uncorrected memory errors."""
    sram_corrected: Count = 0
    """Corrected errors of the chip's own memory."""
    sram_uncorrected: Count = 0
    """Double-bit errors of the chip's own memory; more than 3 are more than its maker allows."""
    rows_remapped: Count = 0
    """Rows replaced for uncorrected errors."""
    remap_pending: bool = False
    """Whether a row waits for the next reset to be replaced."""
    remap_failed: bool = False
    """Whether a row could not be replaced."""
    retired_pages_pending: bool = False
    """Whether a page waits for the next start to be retired (before Ampere)."""
    pcie_replays: Count = 0
    """PCIe packets sent again."""
    pcie_corrected: Count = 0
    """PCIe errors that were corrected (Hopper and newer)."""
    pcie_fatal: Count = 0
    """PCIe errors that were fatal, likewise."""
    pcie_generation: Annotated[int, Meta(ge=1, le=8)] | None = None
    """The generation to which the PCIe link has trained down."""
    pcie_width: Annotated[int, Meta(ge=1, le=16)] | None = None
    """The lanes to which the PCIe link has trained down."""
    nvlink: Annotated[int, Meta(ge=0, lt=18)] = 0
    """The NVLink that the next ones befall."""
    nvlink_replays: Count = 0
    """NVLink packets sent again (until Hopper)."""
    nvlink_recoveries: Count = 0
    """Recoveries after which the NVLink works."""
    nvlink_failed_recoveries: Count = 0
    """Recoveries of the NVLink that failed (Blackwell and newer)."""
    nvlink_symbol_errors: Count = 0
    """Symbols that the NVLink received wrong (Blackwell and newer)."""
    nvlink_inactive: bool = False
    """Whether the NVLink is down (Hopper and newer)."""
    fabric: list[
        Literal["bandwidth_degraded", "route_recovery", "route_unhealthy", "access_timeout"]
    ] = []
    """In which conditions the NVLink fabric is (Hopper and newer)."""


class KernelMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a process's kernels do to the chip while they run."""

    sm_ratio: Ratio = 0.9
    """Share of the multiprocessors that have a warp."""
    occupancy_ratio: Ratio = 0.45
    """Resident warps over the most that fit."""
    tensor_ratio: Ratio = 0.3
    """Share of cycles in which a tensor pipe is active, with half-precision work."""
    fp64_ratio: Ratio = 0.0
    """Share of cycles in which the double-precision pipe is active."""
    fp32_ratio: Ratio = 0.15
    """The same of single precision."""
    fp16_ratio: Ratio = 0.05
    """The same of half precision."""
    integer_ratio: Ratio = 0.1
    """The same of integers."""
    pcie_bytes_per_second: Rate = 2e8
    """What goes over PCIe, each way."""
    nvlink_bytes_per_second: Rate = 0.0
    """What goes over the NVLinks, each way."""
    decoder_ratio: Ratio = 0.0
    """Share of time in which a video decoder is busy."""
    encoder_ratio: Ratio = 0.0
    """Share of time in which a video encoder is busy."""
    jpeg_ratio: Ratio = 0.0
    """Share of time in which a JPEG engine is busy."""
    optical_flow_ratio: Ratio = 0.0
    """Share of time in which an optical flow engine is busy."""


Natural = Annotated[int, Meta(ge=0)]


class EventSupport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a node's driver tells through NVML's event sets."""

    version: Literal["v3", "v2", "none"] = "v3"
    """The newest form of waiting that it has; version 2 tells no time; `none` has no events."""
    types: Natural = 0xFFFF
    """NVML's bits of the events that its GPUs support."""


class GpuIncident(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to a GPU at an instant."""

    node: str
    """The node's name."""
    gpu: Natural
    """The driver's index of the GPU."""
    at_seconds: Annotated[float, Meta(ge=0)]
    """When it happens, since the scenario's start."""
    xid: Natural | None = None
    """The XID; without one it is `event`."""
    event: Literal[
        "xid", "double_bit_error", "single_bit_storm", "memory_retirement",
        "memory_retirement_failure", "nonfatal_poison", "fatal_poison", "unavailable",
        "recovery_action", "mig_change",
    ] = "xid"  # fmt: skip
    """What NVML's event says."""
    gpu_instance: Natural | None = None
    """The GPU instance to which it happens, under MIG."""
    compute_instance: Natural | None = None
    """The compute instance to which it happens, under MIG."""
    pid: Natural | None = None
    """The process that the kernel's log names."""
    text: str = ""
    """What the kernel's log says behind the XID's number."""
    times: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """How often it happens, a millisecond after the other."""
    told_by: Literal["both", "nvml", "kmsg"] = "both"
    """Who tells of it; the kernel's log has XIDs only."""


Name = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.\-]*[a-z0-9])?$")
]
"""A name as Kubernetes allows them."""
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_MEMORY_BYTES)]


Profile = Annotated[str, Meta(pattern=r"^([1-7]c\.)?[1-7]g\.[1-9][0-9]*gb$")]
"""A profile as the driver names it, such as `1g.10gb` or `1c.2g.20gb`."""


class ScenarioMigLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a GPU is cut from a time on."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """From when on, since the scenario's start; no process may live over a new cut."""
    instances: Annotated[list[Profile | list[Profile]], Meta(max_length=7)]
    """A profile for each instance; a list of profiles cuts one GPU instance into compute instances,
    each of which counts as one."""


class PluginDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, or a part of one, that a container was given."""

    gpu: Annotated[int, Meta(ge=0)]
    """The driver's index of the GPU."""
    instance: Annotated[int, Meta(ge=0)] | None = None
    """On a GPU that is cut: the position of the instance in the cut."""
    replica: Annotated[int, Meta(ge=0)] | None = None
    """Where several containers share the device: which of the shares."""
    resource: Annotated[str, Meta(min_length=1)] | None = None
    """The resource; absent: `nvidia.com/gpu`, or `nvidia.com/mig-` and the profile."""
    ids: Literal["uuid", "old-mig", "gke", "hami", "gpu-mem"] = "uuid"
    """Whose form the device's id has."""
    claim: Name | None = None
    """A resource claim of the pod's namespace that gave it, in place of a device plugin."""


class RackPosition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where GPUs are in a rack whose GPUs are one NVLink fabric."""

    chassis_serial_number: Annotated[str, Meta(pattern="^[ -~]{1,16}$")]
    """Serial number of the chassis."""
    slot: Annotated[int, Meta(ge=0, le=254)] = 0
    """Slot in the chassis, those of switches counted."""
    tray: Annotated[int, Meta(ge=0, le=254)] = 0
    """Tray among those that compute."""
    host: Annotated[int, Meta(ge=0, le=254)] = 0
    """Number of the machine in the slot."""
    cluster_uuid: UUID
    """The fabric."""
    clique: Natural = 0
    """The part of the fabric in which GPUs reach each other."""


class GpuGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One or more equal GPUs; what is left out comes from the model's product facts."""

    model: Annotated[str, Meta(min_length=1)]
    """Product name as NVML gives it."""
    count: Annotated[int, Meta(ge=1, le=16)] = 1
    """How many of them."""
    memory_bytes: Annotated[int, Meta(gt=0, le=MAX_MEMORY_BYTES)] | None = None
    """Size of the device memory, the driver's reserve included."""
    unified_memory: bool = False
    """Whether it has no memory of its own: it is built with its CPU, and `memory_bytes` is what the
    machine has. The driver tells what each process holds, and nothing else of memory."""
    idle_watts: Positive | None = None
    """Draw of the board while no kernel runs."""
    max_watts: Positive | None = None
    """Draw of the board while kernels run without a pause."""
    mig: list[ScenarioMigLayout] = []
    """How it is cut into instances, one cut after the other; whole before the first."""
    ailments: list[HealthFault] = []
    """What befalls each of them."""
    energy_step_seconds: Annotated[float, Meta(ge=0, le=10.0)] = 0.0
    """How long the energy counter stands between its steps, as those of products do for 0.1 s; 0:
    it shows each instant."""
    energy_counter: Literal["counting", "frozen", "absent"] = "counting"
    """Whether the energy counter counts, stands at what it had at the scenario's start, as those of
    virtual GPUs do, or is not there."""
    power_mean: Literal["second", "quarter"] = "second"
    """Of what its draw is the mean: of the last second, or, as of A100 and H100, of 25 ms of each
    100, which is shown for the next 100."""
    context_watts: Annotated[float, Meta(ge=0)] = 0.0
    """Draw beyond idle while a process is on it that need run no kernel: 26 to 66 W of one with a
    context of CUDA. It is within `max_watts`, so kernels draw that much less beyond it."""
    accounting: Literal["off", "v1", "v2"] = "off"
    """Whether the driver keeps accounts of processes, and which call it has for them."""
    rack: RackPosition | None = None
    """Where they are in a rack; absent: in none."""
    confidential: Literal["off", "on", "devtools"] = "off"
    """Whether confidential computing is on, on Hopper and newer; one group says it for its node."""


class ClockStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node's wall clock is set; nothing else of the node notices."""

    at_seconds: float
    """When, since the scenario's start; below zero: it was wrong before."""
    by_seconds: float
    """How far ahead it is set; below zero back. Several add up."""


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine with GPUs."""

    name: Name
    """The node's name in Kubernetes."""
    gpus: GpuGroup | list[GpuGroup]
    """Its GPUs in the driver's order."""
    cgroup_driver: Literal["systemd", "cgroupfs", "v1"] = "systemd"
    """How `/proc/<pid>/cgroup` looks: version 2 by systemd or cgroupfs, or version 1."""
    uptime_seconds: Seconds = 18_000.0
    """For how long the node has been up at the scenario's start."""
    labels: dict[str, str] = {}
    """The node object's labels."""
    host_pid: bool = True
    """Whether the agent sees the machine's processes, or those of its own container alone."""
    events: EventSupport = EventSupport()
    """What its driver tells through NVML's event sets."""
    clock_steps: list[ClockStep] = []
    """When its wall clock is set, as by NTP or by hand."""
    driver: DriverModel = DriverModel()
    """In which forms its driver answers."""
    ended_pods_listed_seconds: Seconds = 5.0
    """For how long its kubelet lists a pod after its end: real ones do until it is deleted, which
    may be days."""


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process uses each of its GPUs: kernels and the gaps between them."""

    busy_ratio: Share = 0.5
    """Share of time in which its kernels run while it has the GPU to itself."""
    kernel_seconds: Annotated[float, Meta(ge=0.0005, le=10.0)] = 0.01
    """Mean length of the work that it submits at once."""
    memory_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """Share of its kernels' time in which the memory controller is busy."""
    draw_ratio: Ratio = 1.0
    """What its kernels draw while they run, of the most that the GPU draws beyond idle."""
    mix: KernelMix = KernelMix()
    """What else they do to the chip."""


class GpuVisits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a process has its GPUs open, where that is not all its life.

    Outside of these times it runs on, as `/proc` shows, and is on no GPU: it holds no memory there,
    is in no list of the driver, and each visit has an account of its own.
    """

    first_seconds: Seconds = 0.0
    """When the first visit begins, after the process's start."""
    length_seconds: Positive
    """How long a visit lasts."""
    count: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """How many there are."""
    every_seconds: Positive = 1.0
    """From the begin of one to the begin of the next."""


class Process(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that holds device memory and runs kernels."""

    command: Annotated[str, Meta(min_length=1)]
    """Its command line; the kernel's name of it is the first word's file name, or `comm`."""
    comm: Annotated[str, Meta(min_length=1)] | None = None
    """The kernel's name of it, where that is not the program's; the kernel keeps 15 bytes."""
    gpus: Annotated[list[int], Meta(min_length=1)]
    """The driver's indices of the GPUs that it uses."""
    load: Load = Load()
    """How it uses each of them."""
    memory_bytes: Bytes
    """Device memory that it holds on each of its GPUs."""
    start_seconds: Seconds = 0.0
    """When it starts: after its pod's start, or after the scenario's for a host process."""
    end_seconds: Positive | None = None
    """When it ends, counted likewise; with its pod where absent."""
    memory_visible: bool = True
    """Whether NVML tells how much memory it holds; the device's sum counts it either way."""
    kind: Literal["compute", "graphics", "mps"] = "compute"
    """The driver's list in which it stands; clients of MPS take turns here like all others."""
    instance: Annotated[int, Meta(ge=0)] | None = None
    """On GPUs that are cut: the position of its instance in the cut."""
    also: list[Literal["compute", "graphics", "mps"]] = []
    """Further lists of the driver in which it stands too."""
    visits: GpuVisits | None = None
    """When it has its GPUs open; absent: all its life."""

    @property
    def kinds(self) -> set[str]:
        """Return all lists of the driver in which it stands."""
        return {self.kind, *self.also}


class HostProcess(Process, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process outside of every pod."""

    node: Name
    """The node on which it runs."""
    cgroup: Annotated[str, Meta(pattern="^/")] = "/system.slice/ssh.service"
    """Its cgroup path; one of Slurm's makes it a job's."""


class ScenarioJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job to which a scheduler such as Slurm gives GPUs, as its prolog and epilog write it."""

    id: Annotated[str, Meta(min_length=1)]
    """Its id, a line of the GPUs' files."""
    node: Name
    """The node on which it has them."""
    gpus: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    """The driver's indices of the GPUs."""
    gpu_instance: Annotated[int, Meta(ge=0)] | None = None
    """Where it has a MIG instance alone: the driver's id of the GPU instance."""
    start_seconds: Seconds = 0.0
    """When the prolog writes it, since the scenario's start."""
    end_seconds: Positive | None = None
    """When the epilog takes it away, since the scenario's start; absent: never."""


class ScenarioContainer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A container of a pod."""

    name: Name
    """Its name in the pod."""
    image: str = "registry.local/workload:1"
    """Its image."""
    processes: list[Process] = []
    """Its processes on GPUs."""
    devices: list[PluginDevice] | None = None
    """What the kubelet gave it; absent: the GPUs that its processes use."""


class Controller(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object that stands between a workload and its pod."""

    kind: Annotated[str, Meta(min_length=1)]
    """Its kind, such as `ReplicaSet`."""
    name: Name
    """Its name."""


class Owner(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload by which people know a pod."""

    kind: Annotated[str, Meta(min_length=1)]
    """Its kind, such as `Deployment`."""
    name: Name
    """Its name."""
    via: Controller | None = None
    """The pod's controller where it is not the workload itself; a Deployment's ReplicaSet is
    found from the pod's name."""


class ScenarioPod(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pod with the node on which it runs."""

    namespace: Name
    """Its namespace."""
    name: Name
    """Its name; it may come again once the pod of that name has ended."""
    node: Name
    """The node on which it runs."""
    owner: Owner | None = None
    """The workload to which it belongs."""
    labels: dict[str, str] = {}
    """Its labels."""
    annotations: dict[str, str] = {}
    """Its annotations."""
    start_seconds: Seconds = 0.0
    """When its containers start, since the scenario's start."""
    end_seconds: Positive | None = None
    """When they end, since the scenario's start; absent: never."""
    qos: Literal["guaranteed", "burstable", "besteffort"] = "burstable"
    """Its quality of service class, which its cgroup path shows."""
    in_api: bool = True
    """Whether the API server knows it; a pod that it does not know stays a bare UID."""
    containers: Annotated[list[ScenarioContainer], Meta(min_length=1)]
    """Its containers."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and what happens on it."""

    name: Name
    """What people call it."""
    seed: int = 1
    """From which everything random and every id is drawn."""
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Seconds of the scenario in a second of the machine."""
    sample_period_seconds: Annotated[float, Meta(ge=0.02, le=1)] = 1 / 6
    """Length of the driver's utilization windows; drivers take a sixth of a second to one."""
    time_slice_seconds: Annotated[float, Meta(ge=0.0005, le=1)] = 0.002
    """For how long a GPU runs one of several processes before it turns to the next."""
    nodes: Annotated[list[Node], Meta(min_length=1)]
    """The machines."""
    pods: list[ScenarioPod] = field(default_factory=list)
    """The pods."""
    host_processes: list[HostProcess] = field(default_factory=list)
    """Processes outside of every pod."""
    jobs: list[ScenarioJob] = field(default_factory=list)
    """What a scheduler has given to whom; what a job runs are host processes in its cgroup."""
    incidents: list[GpuIncident] = field(default_factory=list)
    """What goes wrong with the GPUs."""
    faults: list[Fault] = field(default_factory=list)
    """What the drivers do wrong."""
