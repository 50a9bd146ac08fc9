"""The shape of a fleet file: pools of nodes, workloads that come and go, failures and prices.

A fleet describes weeks of turnover in a page: workloads are templates of pods, and a seed draws
their times and loads. A scenario (`gpuledger_simulator.schema`) describes single pods and processes
instead. Points in time are shares of the period, so that a fleet fits a period of any length.
`gpuledger_simulator.fleet.load` reads the file and checks the parts against each other.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gpuledger_simulator.schema import Name, Profile

Count = Annotated[int, Meta(ge=1, le=1_000)]
Share = Annotated[float, Meta(ge=0, le=1)]
Hours = Annotated[float, Meta(gt=0, le=2_000)]
Text = Annotated[str, Meta(min_length=1, max_length=63)]
Sharing = Literal["none", "time-slicing", "memory"]


class Pool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identical nodes of one cluster."""

    name: Name
    """Name of the node pool; the nodes are named after it."""
    cluster: Name
    """Cluster of the nodes."""
    nodes: Count
    """Number of nodes."""
    model: Annotated[str, Meta(min_length=1)]
    """Product name of the GPUs, as NVML reports it."""
    gpus: Annotated[int, Meta(ge=1, le=16)]
    """Number of GPUs of each node."""
    mig: Annotated[list[Profile], Meta(max_length=7)] = []
    """MIG profiles into which each GPU is partitioned; default: not partitioned."""
    sharing: Sharing = "none"
    """How pods share a GPU:

    - `none`: pods get whole GPUs or MIG instances.
    - `time-slicing`: pods get time slices of equal size.
    - `memory`: pods get memory by GiB, as with Alibaba's cGPU."""
    time_slices: Annotated[int, Meta(ge=2, le=48)] = 4
    """With `time-slicing`: number of time slices of a GPU."""
    placement: Literal["pack", "spread"] = "pack"
    """On which node a pod is placed, of those with room: the fullest or the emptiest, as by
    `MostAllocated` and `LeastAllocated` of the Kubernetes scheduler."""
    instance_type: Text | None = None
    """The provider's machine type."""
    zone: Text | None = None
    """The provider's zone."""
    region: Text | None = None
    """The provider's region."""
    capacity_type: Text | None = None
    """How the nodes were bought, such as `reserved` or `spot`."""


class Workload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A template of pods that run at the same time, once or again and again."""

    name: Name
    """Name of the workload; the pods are named after it."""
    namespace: Name
    """Namespace of the pods."""
    kind: Text
    """Kind of the workload, such as `Deployment` or `PyTorchJob`."""
    team: Text
    """The label `team` of the pods and of their namespace."""
    labels: dict[Text, Text] = {}
    """Other labels of the pods."""
    pool: Name
    """Pool on which the pods run."""
    pods: Count = 1
    """Number of pods at the same time; those that do not fit wait."""
    grows_to: Count | None = None
    """Number of pods at the same time at the end of the period, if it grows."""
    queue: Text | None = None
    """The queue in which the pods wait, as Kueue names it."""
    units: Count = 1
    """Number of GPUs or MIG instances that a pod requests; on a shared GPU, of time slices or
    GiB."""
    used_units: Annotated[int, Meta(ge=0)] | None = None
    """Number of GPUs or MIG instances on which the pod runs processes; default: all of them."""
    profile: Profile | None = None
    """MIG profile that the pods request, if the pool is partitioned."""
    busy: tuple[Share, Share] = (0.5, 0.9)
    """Lowest and highest share of an hour in which the kernels of a pod run."""
    idle_hours: Share = 0
    """Share of the hours in which no kernels of a pod run."""
    pattern: Literal["steady", "office"] = "steady"
    """How the load changes: at random, or with the hours of the day and the days of the week."""
    memory_gib: Annotated[float, Meta(ge=0, le=1_000)]
    """Device memory that a pod holds on each GPU or MIG instance, or on its shared GPU."""
    run_hours: tuple[Hours, Hours] | None = None
    """Shortest and longest run of a pod; default: one run for the whole period."""
    pause_hours: tuple[Hours, Hours] = (0.5, 4.0)
    """Shortest and longest pause between two runs."""


class LostGpu(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU that stops responding until its node is restarted."""

    pool: Name
    """Pool of the node."""
    node: Annotated[int, Meta(ge=0)]
    """Number of the node in the pool, from 0."""
    gpu: Annotated[int, Meta(ge=0)]
    """Index of the GPU in the driver's order."""
    at: Annotated[float, Meta(ge=0, lt=1)]
    """Time of the failure: a share of the period."""
    hours: Hours
    """Time until the node is restarted."""
    restart_minutes: Annotated[int, Meta(ge=3, le=1_440)] = 45
    """Duration of the restart, in which none of the node's GPUs has samples."""


class FlakyNode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node on which XIDs end pods again and again."""

    pool: Name
    """Pool of the node."""
    node: Annotated[int, Meta(ge=0)]
    """Number of the node in the pool, from 0."""
    xids: Annotated[list[Annotated[int, Meta(ge=1)]], Meta(min_length=1)]
    """The XIDs, drawn at random."""
    per_day: Annotated[float, Meta(gt=0, le=100)]
    """Number of XIDs per day."""


class CordonedNode(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node on which no further pods are placed for some time; its pods continue to run."""

    pool: Name
    """Pool of the node."""
    node: Annotated[int, Meta(ge=0)]
    """Number of the node in the pool, from 0."""
    at: Annotated[float, Meta(ge=0, lt=1)]
    """Start: a share of the period."""
    hours: Hours
    """Duration."""


class FleetPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a GPU model, for some or all days of the period."""

    name: Text
    """Name of the price."""
    product: Text
    """Words that the GPU's model must contain."""
    per_gpu_hour: Annotated[float, Meta(gt=0)]
    """Price of a GPU-hour."""
    since: Share | None = None
    """Start: a share of the period, rounded to a day; default: the period's start."""
    until: Share | None = None
    """End (exclusive), in the same way; default: the period's end."""


class Fleet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pools, workloads and failures."""

    name: Name
    """Name of the fleet."""
    seed: int = 1
    """Seed of all random values and ids."""
    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"
    """Currency of the prices."""
    prices: list[FleetPrice] = []
    """Prices, from which a price file for the period is written."""
    pools: Annotated[list[Pool], Meta(min_length=1)]
    """Pools of nodes."""
    workloads: list[Workload] = []
    """Workloads, the most important first: it is placed first."""
    lost_gpus: list[LostGpu] = []
    """GPUs that are lost."""
    flaky_nodes: list[FlakyNode] = []
    """Nodes with many XIDs."""
    cordoned_nodes: list[CordonedNode] = []
    """Nodes that are cordoned for some time."""
