"""The shape of a scenario file: nodes with GPUs, pods with owners, processes with load, failures.

Each field states its unit. `gpuledger_simulator.scenario.load` reads the file, checks the parts
against each other and reports invalid input.
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
    """A failure of a node's driver that lasts for a while."""

    node: str
    """Node name."""
    kind: Kind
    """Kind of failure:

    - `lost` and `reset_required`: the GPUs return that error. Handles from before the end of the
      fault keep returning it.
    - `hang`: calls do not return.
    - `garbage`: readings are impossible values.
    - `not_supported`: the driver no longer supports the calls.
    - `growing_list`: lists grow between the two calls that are needed to read them.
    - `driver_reload`: the driver is not loaded. Afterwards all counters restart and no earlier
      handle is valid.
    - `version_mismatch`: the library's version does not match the driver's.
    - `unbind`: the driver announces that it will be unbound, and is unbound as soon as no process
      has the library open; then as `driver_reload`.
    - `frozen`: the functions in `calls` keep returning their first result since the fault's start,
      like the counters of some virtual GPUs."""
    gpus: list[Annotated[int, Meta(ge=0)]] = []
    """Indices of the GPUs in the driver's order; empty: all GPUs."""
    calls: list[Annotated[str, Meta(pattern="^nvml")]] = []
    """NVML function names; empty: all functions that take a GPU, or for `garbage` all functions
    that return a plain reading."""
    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Start, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """End, since the scenario's start; default: never."""
    failures: Annotated[int, Meta(ge=1)] = 1
    """For `growing_list`: number of failed calls before one succeeds."""


Count = Annotated[int, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
Rate = Annotated[float, Meta(ge=0)]

Throttle = Literal[
    "power", "sync_boost", "software_thermal", "hardware_thermal", "power_brake", "board_limit",
    "low_utilization", "reliability",
]  # fmt: skip


class HealthFault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A problem of a GPU. Its counts remain after it ends; everything else ends with it."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Start, since the scenario's start."""
    end_seconds: Annotated[float, Meta(gt=0)] | None = None
    """End, since the scenario's start; default: never."""
    throttle: Throttle | None = None
    """Reason why the clocks are throttled."""
    recovery: Literal["none", "reset", "reboot", "drain_p2p", "drain_and_reset"] = "none"
    """Recovery action that the driver requests."""
    ecc_corrected: Count = 0
    """Corrected memory errors."""
    ecc_uncorrected: Count = 0
    """Uncorrected memory errors."""
    sram_corrected: Count = 0
    """Corrected SRAM errors."""
    sram_uncorrected: Count = 0
    """Double-bit SRAM errors; more than 3 exceed NVIDIA's threshold."""
    rows_remapped: Count = 0
    """Memory rows remapped because of uncorrected errors."""
    remap_pending: bool = False
    """Whether a row is waiting for the next reset to be remapped."""
    remap_failed: bool = False
    """Whether a row could not be remapped."""
    retired_pages_pending: bool = False
    """Whether a page is waiting for the next reboot to be retired (before Ampere)."""
    pcie_replays: Count = 0
    """PCIe packets that were sent again."""
    pcie_corrected: Count = 0
    """Corrected PCIe errors (Hopper and newer)."""
    pcie_fatal: Count = 0
    """Fatal PCIe errors (Hopper and newer)."""
    pcie_generation: Annotated[int, Meta(ge=1, le=8)] | None = None
    """Generation to which the PCIe link has trained down."""
    pcie_width: Annotated[int, Meta(ge=1, le=16)] | None = None
    """Number of lanes to which the PCIe link has trained down."""
    nvlink: Annotated[int, Meta(ge=0, lt=18)] = 0
    """Number of the NVLink that the following fields apply to."""
    nvlink_replays: Count = 0
    """NVLink packets that were sent again (up to Hopper)."""
    nvlink_recoveries: Count = 0
    """Successful recoveries of the NVLink."""
    nvlink_failed_recoveries: Count = 0
    """Failed recoveries of the NVLink (Blackwell and newer)."""
    nvlink_symbol_errors: Count = 0
    """Symbols that the NVLink received with errors (Blackwell and newer)."""
    nvlink_inactive: bool = False
    """Whether the NVLink is down (Hopper and newer)."""
    fabric: list[
        Literal["bandwidth_degraded", "route_recovery", "route_unhealthy", "access_timeout"]
    ] = []
    """Conditions of the NVLink fabric (Hopper and newer)."""


class KernelMix(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The load that a process's kernels put on the chip while they run."""

    sm_ratio: Ratio = 0.9
    """Share of the multiprocessors with a resident warp."""
    occupancy_ratio: Ratio = 0.45
    """Resident warps divided by the maximum."""
    tensor_ratio: Ratio = 0.3
    """Share of cycles in which a tensor pipe is active with half-precision work."""
    fp64_ratio: Ratio = 0.0
    """Share of cycles in which the double-precision pipe is active."""
    fp32_ratio: Ratio = 0.15
    """Share of cycles in which the single-precision pipe is active."""
    fp16_ratio: Ratio = 0.05
    """Share of cycles in which the half-precision pipe is active."""
    integer_ratio: Ratio = 0.1
    """Share of cycles in which the integer pipe is active."""
    pcie_bytes_per_second: Rate = 2e8
    """PCIe traffic in each direction."""
    nvlink_bytes_per_second: Rate = 0.0
    """Traffic of all NVLinks together, in each direction."""
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
    """The events that a node's driver reports through NVML's event sets."""

    version: Literal["v3", "v2", "none"] = "v3"
    """Newest wait function that the driver has; version 2 reports no time; `none`: no events."""
    types: Natural = 0xFFFF
    """NVML's bit mask of the event types that the node's GPUs support."""


class GpuIncident(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens to a GPU at one instant."""

    node: str
    """Node name."""
    gpu: Natural
    """Index of the GPU in the driver's order."""
    at_seconds: Annotated[float, Meta(ge=0)]
    """Time, since the scenario's start."""
    xid: Natural | None = None
    """XID; leave it out if `event` is not `xid`."""
    event: Literal[
        "xid", "double_bit_error", "single_bit_storm", "memory_retirement",
        "memory_retirement_failure", "nonfatal_poison", "fatal_poison", "unavailable",
        "recovery_action", "mig_change",
    ] = "xid"  # fmt: skip
    """Type of the NVML event."""
    gpu_instance: Natural | None = None
    """MIG GPU instance that is affected."""
    compute_instance: Natural | None = None
    """MIG compute instance that is affected."""
    pid: Natural | None = None
    """Process id in the kernel log."""
    text: str = ""
    """Text after the XID number in the kernel log."""
    times: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Number of repetitions, one millisecond apart."""
    reported_by: Literal["both", "nvml", "kmsg"] = "both"
    """Where the incident is reported; the kernel log contains only XIDs."""


Name = Annotated[
    str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.\-]*[a-z0-9])?$")
]
"""A valid Kubernetes name."""
Seconds = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_MEMORY_BYTES)]


Profile = Annotated[str, Meta(pattern=r"^([1-7]c\.)?[1-7]g\.[1-9][0-9]*gb$")]
"""A MIG profile in the driver's notation, such as `1g.10gb` or `1c.2g.20gb`."""


class ScenarioMigLayout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU's MIG instances from a given time."""

    start_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Start, since the scenario's start; processes must end before the layout changes."""
    instances: Annotated[list[Profile | list[Profile]], Meta(max_length=7)]
    """One profile per instance. A list of profiles divides one GPU instance into compute instances,
    and each counts as one instance."""


class PluginDevice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, or a part of a GPU, that is allocated to a container."""

    gpu: Annotated[int, Meta(ge=0)]
    """Index of the GPU in the driver's order."""
    instance: Annotated[int, Meta(ge=0)] | None = None
    """On a MIG-partitioned GPU: position of the instance in the layout."""
    replica: Annotated[int, Meta(ge=0)] | None = None
    """Number of the share, if several containers share the device."""
    resource: Annotated[str, Meta(min_length=1)] | None = None
    """Resource name; default: `nvidia.com/gpu`, or `nvidia.com/mig-` and the profile."""
    ids: Literal["uuid", "old-mig", "gke", "hami", "gpu-mem"] = "uuid"
    """Device plugin whose format the device id has."""
    claim: Name | None = None
    """Resource claim in the pod's namespace that allocates the device instead of a device
    plugin."""


class RackPosition(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of GPUs in a rack that forms one NVLink fabric."""

    chassis_serial_number: Annotated[str, Meta(pattern="^[ -~]{1,16}$")]
    """Chassis serial number."""
    slot: Annotated[int, Meta(ge=0, le=254)] = 0
    """Slot in the chassis; slots of switches count too."""
    tray: Annotated[int, Meta(ge=0, le=254)] = 0
    """Number of the tray among the compute trays."""
    host: Annotated[int, Meta(ge=0, le=254)] = 0
    """Number of the host in the slot."""
    cluster_uuid: UUID
    """UUID of the fabric."""
    clique: Natural = 0
    """Part of the fabric in which all GPUs can reach each other."""


class GpuGroup(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One or more identical GPUs; fields that are left out come from the model's product data."""

    model: Annotated[str, Meta(min_length=1)]
    """Product name as NVML reports it."""
    count: Annotated[int, Meta(ge=1, le=16)] = 1
    """Number of GPUs."""
    memory_bytes: Annotated[int, Meta(gt=0, le=MAX_MEMORY_BYTES)] | None = None
    """Size of the device memory, including the driver's reserve."""
    unified_memory: bool = False
    """Whether GPU and CPU share one memory, whose size is then `memory_bytes`. The driver reports
    only the memory of each process."""
    idle_watts: Positive | None = None
    """Power draw while no kernel runs."""
    max_watts: Positive | None = None
    """Power draw while kernels run without a pause."""
    mig: list[ScenarioMigLayout] = []
    """MIG layouts in order of time; the GPU is unpartitioned before the first."""
    ailments: list[HealthFault] = []
    """Health problems of each GPU."""
    energy_step_seconds: Annotated[float, Meta(ge=0, le=10.0)] = 0.0
    """Interval between steps of the energy counter, about 0.1 s on real products; 0: it is
    continuous."""
    energy_counter: Literal["counting", "frozen", "absent"] = "counting"
    """Whether the energy counter counts, keeps its value from the scenario's start like those of
    virtual GPUs, or does not exist."""
    power_mean: Literal["second", "quarter"] = "second"
    """Window of the power reading: the last second, or, as since A100 and H100, the last 25 ms of
    each 100 ms, reported for the next 100 ms."""
    context_watts: Annotated[float, Meta(ge=0)] = 0.0
    """Power draw beyond idle while any process has the GPU open, even without kernels: 26 to 66 W
    for a CUDA context. It counts toward `max_watts`, so kernels draw that much less."""
    accounting: Literal["off", "v1", "v2"] = "off"
    """Whether the driver keeps process accounts, and the version of the call that reads them."""
    rack: RackPosition | None = None
    """Position in a rack; default: not in a rack."""
    confidential: Literal["off", "on", "devtools"] = "off"
    """Mode of confidential computing (Hopper and newer). If any group turns it on, it is on for the
    node."""


class ClockStep(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A step of a node's wall clock, which does not affect anything else on the node."""

    at_seconds: float
    """Time of the step, since the scenario's start; negative: the clock was already wrong."""
    by_seconds: float
    """Size of the step; negative: the clock is set back. Steps add up."""


class Node(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine with GPUs."""

    name: Name
    """Node name in Kubernetes."""
    gpus: GpuGroup | list[GpuGroup]
    """GPUs in the driver's order."""
    cgroup_driver: Literal["systemd", "cgroupfs", "v1"] = "systemd"
    """Format of `/proc/<pid>/cgroup`: version 2 by systemd or cgroupfs, or version 1."""
    uptime_seconds: Seconds = 18_000.0
    """Time since boot at the scenario's start."""
    labels: dict[str, str] = {}
    """Labels of the node object."""
    host_pid: bool = True
    """Whether the agent sees the host's processes, or only those of its own container."""
    events: EventSupport = EventSupport()
    """Events that the driver reports through NVML's event sets."""
    clock_steps: list[ClockStep] = []
    """Steps of the wall clock, as by NTP or by hand."""
    driver: DriverModel = DriverModel()
    """How the driver reports readings."""
    ended_pods_listed_seconds: Seconds = 5.0
    """Time for which the kubelet lists a pod after its end, at most until the next pod of its name
    starts. Real kubelets list it until it is deleted, which may take days."""


class Load(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process uses each of its GPUs: kernels and the gaps between them."""

    busy_ratio: Share = 0.5
    """Share of time in which its kernels run if it has the GPU to itself."""
    kernel_seconds: Annotated[float, Meta(ge=0.0005, le=10.0)] = 0.01
    """Mean duration of one submission of work."""
    memory_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.4
    """Share of its kernels' time in which the memory controller is busy."""
    draw_ratio: Ratio = 1.0
    """Share of the GPU's maximum power draw beyond idle that its kernels draw while they run."""
    mix: KernelMix = KernelMix()
    """Use of the chip's other parts."""


class GpuVisits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The times at which a process has its GPUs open, if that is not its whole life.

    Outside these times the process keeps running, as `/proc` shows, but has no GPU open: it has no
    device memory and is in none of the driver's lists. Each visit has its own account.
    """

    first_seconds: Seconds = 0.0
    """Start of the first visit, after the process's start."""
    length_seconds: Positive
    """Duration of a visit."""
    count: Annotated[int, Meta(ge=1, le=100_000)] = 1
    """Number of visits."""
    every_seconds: Positive = 1.0
    """Time from the start of one visit to the start of the next."""


class Process(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program that uses device memory and runs kernels."""

    command: Annotated[str, Meta(min_length=1)]
    """Command line. The kernel's name for the process is the first word's file name, or `comm`."""
    comm: Annotated[str, Meta(min_length=1)] | None = None
    """The kernel's name for the process, if it is not the program's; the kernel keeps 15 bytes."""
    pid: Annotated[int, Meta(ge=2, le=4_194_304)] | None = None
    """Process id, for processes that reuse the id of an ended one; default: an id of its own."""
    gpus: Annotated[list[int], Meta(min_length=1)]
    """Indices of its GPUs in the driver's order."""
    load: Load = Load()
    """Use of each GPU."""
    memory_bytes: Bytes
    """Device memory that it uses on each GPU."""
    start_seconds: Seconds = 0.0
    """Start, relative to the pod's start, or to the scenario's start for a host process."""
    end_seconds: Positive | None = None
    """End, relative to the same time; default: the pod's end."""
    memory_visible: bool = True
    """Whether NVML reports its memory; the device's total includes it in any case."""
    kind: Literal["compute", "graphics", "mps"] = "compute"
    """Driver list that contains the process. MPS clients take turns here, like all other
    processes."""
    instance: Annotated[int, Meta(ge=0)] | None = None
    """On MIG-partitioned GPUs: position of its instance in the layout."""
    also: list[Literal["compute", "graphics", "mps"]] = []
    """Other driver lists that contain the process too."""
    visits: GpuVisits | None = None
    """Times at which it has its GPUs open; default: its whole life."""

    @property
    def kinds(self) -> set[str]:
        """All driver lists that contain the process."""
        return {self.kind, *self.also}


class HostProcess(Process, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A process outside pods."""

    node: Name
    """Node on which it runs."""
    cgroup: Annotated[str, Meta(pattern="^/")] = "/system.slice/ssh.service"
    """Cgroup path; a Slurm path makes the process part of a job."""


class ScenarioJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job of a scheduler such as Slurm, with the GPUs that its prolog and epilog write."""

    id: Annotated[str, Meta(min_length=1)]
    """Job id, one line in each GPU's file."""
    node: Name
    """Node of the GPUs."""
    gpus: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    """Indices of the GPUs in the driver's order."""
    gpu_instance: Annotated[int, Meta(ge=0)] | None = None
    """The driver's id of the GPU instance, if the job has only one MIG instance."""
    start_seconds: Seconds = 0.0
    """Time at which the prolog writes the files, since the scenario's start."""
    end_seconds: Positive | None = None
    """Time at which the epilog removes them, since the scenario's start; default: never."""


class ScenarioContainer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A container of a pod."""

    name: Name
    """Container name."""
    image: str = "registry.local/workload:1"
    """Image."""
    processes: list[Process] = []
    """Processes on GPUs."""
    devices: list[PluginDevice] | None = None
    """Devices that the kubelet allocated; default: the GPUs that its processes use."""


class Controller(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object between a workload and its pod."""

    kind: Annotated[str, Meta(min_length=1)]
    """Kind, such as `ReplicaSet`."""
    name: Name
    """Name."""


class Owner(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload that a pod belongs to."""

    kind: Annotated[str, Meta(min_length=1)]
    """Kind, such as `Deployment`."""
    name: Name
    """Name."""
    via: Controller | None = None
    """The pod's controller, if it is not the workload itself. A Deployment's ReplicaSet is derived
    from the pod's name."""


class ScenarioPod(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pod and the node on which it runs."""

    namespace: Name
    """Namespace."""
    name: Name
    """Name; another pod may reuse it after this one has ended."""
    node: Name
    """Node name."""
    owner: Owner | None = None
    """Workload that the pod belongs to."""
    labels: dict[str, str] = {}
    """Labels."""
    annotations: dict[str, str] = {}
    """Annotations."""
    start_seconds: Seconds = 0.0
    """Start of its containers, since the scenario's start."""
    end_seconds: Positive | None = None
    """End of its containers, since the scenario's start; default: never."""
    wait_seconds: Seconds = 0.0
    """Time for which it waits for its node before it starts, without a node and `Unschedulable` in
    the API server. The wait begins with the scenario at the earliest."""
    qos: Literal["guaranteed", "burstable", "besteffort"] = "burstable"
    """Quality-of-service class, which is part of the cgroup path."""
    in_api: bool = True
    """Whether the API server has the pod; otherwise only its node has it, with a derived UID."""
    containers: Annotated[list[ScenarioContainer], Meta(min_length=1)]
    """Containers."""


class Scenario(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster and the events on it."""

    name: Name
    """Name of the scenario."""
    seed: int = 1
    """Seed of all random values and ids."""
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Scenario seconds per real second."""
    sample_period_seconds: Annotated[float, Meta(ge=0.02, le=1)] = 1 / 6
    """Length of the driver's utilization windows; real drivers use 1/6 s to 1 s."""
    time_slice_seconds: Annotated[float, Meta(ge=0.0005, le=1)] = 0.002
    """Time for which a shared GPU runs one process before it switches to the next."""
    nodes: Annotated[list[Node], Meta(min_length=1)]
    """Nodes."""
    pods: list[ScenarioPod] = field(default_factory=list)
    """Pods."""
    host_processes: list[HostProcess] = field(default_factory=list)
    """Processes outside pods."""
    jobs: list[ScenarioJob] = field(default_factory=list)
    """Scheduler jobs; the processes of a job are host processes in its cgroup."""
    incidents: list[GpuIncident] = field(default_factory=list)
    """Incidents of the GPUs."""
    faults: list[Fault] = field(default_factory=list)
    """Failures of the drivers."""
