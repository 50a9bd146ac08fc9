"""What a reading can be at all: one table, for the agent that sends it and for whoever decodes it.

A value outside can be no reading: drivers do answer with utilization 4294967295, and a record may
be written by anybody. The limits leave room for hardware to come; they catch what no hardware does.
JSON knows neither NaN nor infinity, and no bound lets them through. Here live the bounds and the
types of fields that have them. No record. A position has no bound of its own, as it is held to its
table when the tick is booked; nor has what a wall clock shows, which may be set to anything.
"""

from typing import Annotated, Final

import msgspec

from gpuledger.records.base import MAX_SEQ

MAX_WATTS: Final = 3_000
"""Twice the power limit of the largest board: NVIDIA's B300 has 1,400 W."""
MAX_MILLIWATTS: Final = MAX_WATTS * 1_000
"""`MAX_WATTS` in the driver's unit, as records have it."""
MAX_MILLIJOULES: Final = 2**62
"""What a counter of millijoules in 64 bits may show (`nvmlDeviceGetTotalEnergyConsumption`)."""
MAX_INTERVAL_SECONDS: Final = 86_400 + 3_600
"""A day and an hour. A tick comes a minute after the one before at most
(`sampling_interval_seconds`), but where no GPU answered it covers the time since one did, until the
agent ends after `watchdog_seconds`, a day at most; the hour is for a machine that is slow. How long
a tick then waits in the spool adds nothing to what it covers. The agent begins anew after an
interval that is longer still."""
MAX_INTERVAL_NS: Final = MAX_INTERVAL_SECONDS * 10**9
"""`MAX_INTERVAL_SECONDS` in nanoseconds, as ticks have it."""
MAX_BOOTTIME_NS: Final = MAX_SEQ * 10**6
"""`MAX_SEQ`, ten years, in nanoseconds: no process started later after the boot of its node."""
MAX_PID: Final = 2**22
"""The kernel's own limit on 64-bit machines (`PID_MAX_LIMIT`)."""
MAX_TICK_MILLIJOULES: Final = MAX_MILLIWATTS * MAX_INTERVAL_SECONDS
"""`MAX_MILLIWATTS` for the longest interval of a tick."""
MIN_CELSIUS: Final = -20
MAX_CELSIUS: Final = 150
"""Boards are specified for 0 to 50 °C around them and shut down by about 105 °C (memory)."""
MAX_MARGIN_CELSIUS: Final = 200
"""More than lies between the coldest a GPU may be and where it shuts down, to either side."""
MAX_HERTZ: Final = 20_000_000_000
"""GDDR7, the fastest clock that NVML tells, has 16 GHz at most as it counts."""
MAX_MEMORY_BYTES: Final = 2**48
"""256 TiB: what a 48-bit address, NVIDIA's virtual one until Blackwell, can name."""
MAX_FAN_RATIO: Final = 10.0
"""NVML's header: the speed is of the one that fans are meant to run at, and may exceed 100 %."""
MAX_SECONDS: Final = 100 * 366 * 86_400
"""A century."""
MAX_DURATION_NS: Final = MAX_SECONDS * 10**9
"""`MAX_SECONDS` in nanoseconds, which are a third of what 64 bits hold."""
MAX_BYTES_PER_SECOND: Final = 2**44
"""16 TiB/s: NVLink 5 has 1.8 TB/s a GPU, both directions together."""
MAX_PERFORMANCE_STATE: Final = 15
"""NVML's `nvmlPstates_t`: P0 to P15."""

IntervalNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTERVAL_NS)]
BoottimeNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_BOOTTIME_NS)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=MAX_PID)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
FanRatio = Annotated[float, msgspec.Meta(ge=0, le=MAX_FAN_RATIO)]
Milliwatts = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIWATTS)]
Millijoules = Annotated[int, msgspec.Meta(ge=0, le=MAX_MILLIJOULES)]
TickMillijoules = Annotated[int, msgspec.Meta(ge=0, le=MAX_TICK_MILLIJOULES)]
Celsius = Annotated[int, msgspec.Meta(ge=MIN_CELSIUS, le=MAX_CELSIUS)]
MarginCelsius = Annotated[int, msgspec.Meta(ge=-MAX_MARGIN_CELSIUS, le=MAX_MARGIN_CELSIUS)]
Hertz = Annotated[int, msgspec.Meta(ge=0, le=MAX_HERTZ)]
MemoryBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_BYTES)]
DurationNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_DURATION_NS)]
BytesPerSecond = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES_PER_SECOND)]
PerformanceState = Annotated[int, msgspec.Meta(ge=0, le=MAX_PERFORMANCE_STATE)]

# How long texts and lists may be: one tick costs whoever reads it time and memory by what it holds,
# and anybody may write one. Lengths of text are in characters. What nodes and pods really have is
# far below; what is made here is cut to it and counted (`gpuledger.records.fitting`).

MAX_ID_LENGTH: Final = 256
"""UUIDs have 36 characters, NVML's buffers for them 96 (`NVML_DEVICE_UUID_V2_BUFFER_SIZE`), ids of
containers 64; device plugins put a replica's number behind a UUID, others the name of a GPU."""
MAX_JOB_ID_LENGTH: Final = 128
"""Slurm's are numbers; PBS has a number, an array's index and the server's name."""
MAX_WORD_LENGTH: Final = 256
"""Names of products and versions have 96 in NVML's buffers (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`)."""
MAX_SENTENCE_LENGTH: Final = 2_000
"""A line of the kernel's log has 1,024 (`LOG_LINE_MAX`)."""
MAX_PATH_LENGTH: Final = 4_096
"""Linux's `PATH_MAX`."""
MAX_LABEL_LENGTH: Final = 63
"""Kubernetes: a DNS-1123 label, as namespaces and containers have, and a label's value."""
MAX_SUBDOMAIN_LENGTH: Final = 253
"""Kubernetes: a DNS-1123 subdomain, as pods, workloads and nodes have for names."""
MAX_QUALIFIED_LENGTH: Final = MAX_SUBDOMAIN_LENGTH + 1 + MAX_LABEL_LENGTH
"""Kubernetes: `prefix/name` of labels, annotations and resources, and `namespace/name`."""
MAX_ANNOTATION_LENGTH: Final = 2**18
"""Kubernetes' limit on all annotations of an object together (`TotalAnnotationSizeLimitB`)."""
MAX_BASE64_LENGTH: Final = 2**20
"""More than a message has."""

MAX_GPUS: Final = 256
"""GPUs and MIG instances of a node: 32 GPUs, the most that boards of PCIe switches carry, and seven
instances of each, as many as MIG makes. How a GPU is shared in time makes no more of them."""
MAX_PROCESSES: Final = 16_384
"""Processes on a node's GPUs, one for each GPU that a process uses; MPS serves 60 on a GPU, and
where a GPU is shared in time there are as many as the memory holds, a few hundred MB each."""
MAX_CONTAINERS: Final = 4_096
"""A node runs 110 pods unless told otherwise, and 500 where a provider allows the most; more than
eight containers of each."""
MAX_ALLOCATIONS: Final = 4_096
"""Devices given out on a node: 16 GPUs shared in time by 256, or 14 GPUs of 288 GiB by GiB."""
MAX_JOB_ALLOCATIONS: Final = 4_096
"""Jobs of a node's GPUs and instances: 256 of these, shared by 16 jobs each."""
MAX_ENDED_PROCESSES: Final = 2_048
"""Ends in one tick, half a message; the driver's own buffer holds accounts of 4,000 processes of a
GPU, over hours. The agent keeps no more until they are told."""
MAX_ENTRIES: Final = MAX_CONTAINERS + MAX_ALLOCATIONS + MAX_JOB_ALLOCATIONS + 4
"""On one GPU: one for each container or job with processes, one for each that holds it unused, and
one each for the host, what is unattributed, and what is idle and held by nobody; one more in
reserve."""
MAX_EVENT_PODS: Final = MAX_CONTAINERS + MAX_ALLOCATIONS
"""Each of them has a container in the event, or holds a device there."""
MAX_DESCRIPTION_BYTES: Final = 8_192
"""What an event says of one namespace, or of its node, encoded: ten times what a few labels take.
What says more is described without its annotations, and then without its labels."""
MAX_NAMESPACES_BYTES: Final = 8 * MAX_DESCRIPTION_BYTES
"""What an event says of its namespaces together, a sixteenth of a message; what is beyond is left
out, the last ones by name."""
MAX_INCIDENT_PROCESSES: Final = MAX_CONTAINERS
"""Processes on one GPU, each of which may be in a container of its own."""
MAX_INCIDENT_PODS: Final = MAX_INCIDENT_PROCESSES + MAX_ALLOCATIONS
"""Each of them has a process or an allocation in the incident."""
MAX_POD_CONTAINERS: Final = 1_024
"""Containers of one pod: its object has 1.5 MB at most in etcd, which is more than a kilobyte for
each."""
MAX_LABELS: Final = 256
"""Labels or annotations of one pod, of those that are asked for."""
MAX_RESOURCES: Final = 256
"""Kinds of GPU resources that a pod asks for: a plugin names some for each MIG profile."""
MAX_CLAIMS: Final = 256
"""ResourceClaims of one container, each of which is one of its pod's."""
MAX_CAPABILITIES: Final = 4_096
"""Questions that a driver is put: NVML has 400 functions, and fields with numbers below 300."""
MAX_COUNTERS: Final = 1_024
"""Counters of a GPU that can begin again, those of each link included."""
MAX_LINKS: Final = 256
"""NVLinks of a GPU, of which Blackwell has 18, and its decoders, of which it has 8."""
MAX_ENDED_KINDS: Final = 64
"""Kinds of states of a GPU that end at once: there are a dozen."""
MAX_FEC_ERRORS: Final = 64
"""Errors that an NVLink can correct in a block, and one: NVML tells of 0 to 15."""
MAX_UNRESPONSIVE_NODES: Final = 1_000
"""Unresponsive nodes of one partition that a watermark names; it counts all of them."""
MAX_BOOTS: Final = 64
"""Boots of a node that are remembered, which are a few."""

Id = Annotated[str, msgspec.Meta(max_length=MAX_ID_LENGTH)]
JobId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_JOB_ID_LENGTH)]
Word = Annotated[str, msgspec.Meta(max_length=MAX_WORD_LENGTH)]
Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE_LENGTH)]
Path = Annotated[str, msgspec.Meta(max_length=MAX_PATH_LENGTH)]
Label = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_LENGTH)]
Subdomain = Annotated[str, msgspec.Meta(max_length=MAX_SUBDOMAIN_LENGTH)]
QualifiedName = Annotated[str, msgspec.Meta(max_length=MAX_QUALIFIED_LENGTH)]
Base64 = Annotated[str, msgspec.Meta(max_length=MAX_BASE64_LENGTH)]
Labels = Annotated[dict[QualifiedName, Label], msgspec.Meta(max_length=MAX_LABELS)]
Annotations = Annotated[
    dict[
        QualifiedName,
        Annotated[str, msgspec.Meta(max_length=MAX_ANNOTATION_LENGTH)],
    ],
    msgspec.Meta(max_length=MAX_LABELS),
]


def at_most(length: int) -> msgspec.Meta:
    """Return the limit of a list or a mapping of so many at most."""
    return msgspec.Meta(max_length=length)
