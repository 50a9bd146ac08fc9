"""Bounds of all readings in one table, used by the agent that sends them and by every decoder.

A value outside its bounds cannot be a reading. Drivers do return a utilization of 4294967295, and
anybody may write a record. The bounds leave room for future hardware, so they catch only values
that no hardware produces. JSON has neither NaN nor infinity, and no bound accepts them. This module
holds the bounds and the field types that use them, but no records. Positions in lists are not
bounded here, because booking checks them against the lists; nor are wall-clock times, which may be
set to anything.
"""

from typing import Annotated, Final

import msgspec

from gpuledger.records.base import MAX_SEQ

MAX_WATTS: Final = 3_000
"""Twice the power limit of the largest GPU: NVIDIA's B300 has 1,400 W."""
MAX_MILLIWATTS: Final = MAX_WATTS * 1_000
"""`MAX_WATTS` in milliwatts, the driver's unit, which records use."""
MAX_MILLIJOULES: Final = 2**62
"""Highest value of a 64-bit counter of millijoules (`nvmlDeviceGetTotalEnergyConsumption`)."""
MAX_INTERVAL_SECONDS: Final = 86_400 + 3_600
"""A day and an hour. A sample comes at most a minute after the one before
(`sampling_interval_seconds`). If no GPU answers, the next sample covers the time since the last
answer, until the agent exits after `watchdog_seconds`, at most a day; the hour allows for a slow
machine. Time that a sample waits in the spool does not count. After a longer interval the agent
starts over."""
MAX_INTERVAL_NS: Final = MAX_INTERVAL_SECONDS * 10**9
"""`MAX_INTERVAL_SECONDS` in nanoseconds, the unit of ticks."""
MAX_BOOTTIME_NS: Final = MAX_SEQ * 10**6
"""`MAX_SEQ`, ten years, in nanoseconds: the latest start of a process after its node's boot."""
MAX_PID: Final = 2**22
"""The kernel's limit on 64-bit machines (`PID_MAX_LIMIT`)."""
MAX_TICK_MILLIJOULES: Final = MAX_MILLIWATTS * MAX_INTERVAL_SECONDS
"""Energy of a GPU that draws `MAX_MILLIWATTS` over the longest interval of a tick."""
MIN_CELSIUS: Final = -20
MAX_CELSIUS: Final = 150
"""GPUs are specified for an ambient 0 to 50 °C and shut down by about 105 °C (memory)."""
MAX_MARGIN_CELSIUS: Final = 200
"""More than the difference between the coldest allowed temperature and shutdown, up or down."""
MAX_HERTZ: Final = 20_000_000_000
"""The fastest clock that NVML reports, of GDDR7, is at most 16 GHz as NVML counts it."""
MAX_MEMORY_BYTES: Final = 2**48
"""256 TiB: the range of a 48-bit address, NVIDIA's virtual addresses until Blackwell."""
MAX_FAN_RATIO: Final = 10.0
"""According to NVML's header, speed is relative to the intended maximum and may exceed 100 %."""
MAX_SECONDS: Final = 100 * 366 * 86_400
"""A century."""
MAX_DURATION_NS: Final = MAX_SECONDS * 10**9
"""`MAX_SECONDS` in nanoseconds: a third of the range of 64 bits."""
MAX_BYTES_PER_SECOND: Final = 2**44
"""16 TiB/s: NVLink 5 has 1.8 TB/s per GPU, both directions together."""
MAX_PERFORMANCE_STATE: Final = 15
"""NVML's `nvmlPstates_t`: P0 to P15."""

IntervalNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTERVAL_NS)]
BoottimeNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_BOOTTIME_NS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=MAX_PID)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
SharePpm = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
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

# Lengths of texts and lists: reading a tick costs time and memory in proportion to its contents,
# and anybody may write one. Text lengths are in characters. Real nodes and pods stay far below
# these bounds; the writers here cut what is longer and count it (`gpuledger.records.fitting`).

MAX_ID_LENGTH: Final = 256
"""UUIDs have 36 characters, NVML's buffers for them 96 (`NVML_DEVICE_UUID_V2_BUFFER_SIZE`),
container ids 64; some device plugins append a replica's number to a UUID, others use a GPU's
name."""
MAX_JOB_ID_LENGTH: Final = 128
"""Slurm's job ids are numbers; PBS has a number, an array index and the server's name."""
MAX_WORD_LENGTH: Final = 256
"""NVML's buffers for product names and versions have 96 (`NVML_DEVICE_NAME_V2_BUFFER_SIZE`)."""
MAX_SENTENCE_LENGTH: Final = 2_000
"""A line of the kernel log has at most 1,024 (`LOG_LINE_MAX`)."""
MAX_PATH_LENGTH: Final = 4_096
"""Linux's `PATH_MAX`."""
MAX_LABEL_LENGTH: Final = 63
"""Kubernetes: a DNS-1123 label (names of namespaces and containers), or a label's value."""
MAX_SUBDOMAIN_LENGTH: Final = 253
"""Kubernetes: a DNS-1123 subdomain (names of pods, workloads and nodes)."""
MAX_QUALIFIED_LENGTH: Final = MAX_SUBDOMAIN_LENGTH + 1 + MAX_LABEL_LENGTH
"""Kubernetes: `prefix/name` of labels, annotations and resources; also `namespace/name`."""
MAX_ANNOTATION_LENGTH: Final = 2**18
"""Kubernetes' limit on all annotations of one object (`TotalAnnotationSizeLimitB`)."""
MAX_BASE64_LENGTH: Final = 2**20
"""More than a message can hold."""

MAX_GPUS: Final = 256
"""GPUs and MIG instances per node: 32 GPUs, the most that PCIe switch systems carry, with seven
instances each, the most that MIG creates. Time slicing does not add to them."""
MAX_PROCESSES: Final = 16_384
"""Processes on a node's GPUs, counted once per GPU that a process uses. MPS serves 60 per GPU; with
time slicing, memory limits them to a few hundred at a few hundred MB each."""
MAX_CONTAINERS: Final = 4_096
"""A node runs 110 pods by default, and 500 at the provider that allows the most; this leaves more
than eight containers per pod."""
MAX_ALLOCATIONS: Final = 4_096
"""Devices allocated on a node: 16 GPUs in 256 time-sliced shares, or 14 GPUs of 288 GiB by GiB."""
MAX_JOB_ALLOCATIONS: Final = 4_096
"""Jobs on a node's GPUs and instances: 256 devices, each shared by 16 jobs."""
MAX_ENDED_PROCESSES: Final = 2_048
"""Processes that ended in one sample; they take half a message. The driver keeps accounts of 4,000
processes per GPU, over hours. The agent keeps at most this many until they are sent."""
MAX_ENTRIES: Final = MAX_CONTAINERS + MAX_ALLOCATIONS + MAX_JOB_ALLOCATIONS + 4
"""Per GPU: one for each container or job with processes, and one for each with an unused
allocation. One each is for the host, for unattributed use, and for the idle part that is not
allocated; one more is in reserve."""
MAX_EVENT_PODS: Final = MAX_CONTAINERS + MAX_ALLOCATIONS
"""Each pod has a container in the event, or a device allocated to it there."""
MAX_DESCRIPTION_BYTES: Final = 8_192
"""Encoded size of an event's description of one namespace or of its node: ten times what a few
labels take. A larger description loses its annotations first, then its labels."""
MAX_NAMESPACES_BYTES: Final = 8 * MAX_DESCRIPTION_BYTES
"""Encoded size of all namespace descriptions of an event, a sixteenth of a message. Beyond that,
the last namespaces by name are left out."""
MAX_INCIDENT_PROCESSES: Final = MAX_CONTAINERS
"""Processes on one GPU; each may be in its own container."""
MAX_INCIDENT_PODS: Final = MAX_INCIDENT_PROCESSES + MAX_ALLOCATIONS
"""Each pod has a process or an allocation in the incident."""
MAX_POD_CONTAINERS: Final = 1_024
"""Containers of one pod: a pod's object in etcd has at most 1.5 MB, more than a kilobyte for each
container."""
MAX_LABELS: Final = 256
"""Labels or annotations of one pod that the settings select."""
MAX_RESOURCES: Final = 256
"""GPU resource names that a pod requests: a device plugin has several for each MIG profile."""
MAX_CLAIMS: Final = 256
"""ResourceClaims of one container; they belong to its pod."""
MAX_SCHEDULING_GATES: Final = 256
"""Scheduling gates of one pod; there are usually none or one."""
MAX_CAPABILITIES: Final = 4_096
"""Driver calls that are probed: NVML has 400 functions, and fields with numbers below 300."""
MAX_COUNTERS: Final = 1_024
"""Counters of a GPU that can restart, counters of each link included."""
MAX_LINKS: Final = 256
"""NVLinks of a GPU (18 on Blackwell), or its decoders (8 on Blackwell)."""
MAX_ENDED_KINDS: Final = 64
"""Kinds of GPU states that end at once; there are a dozen."""
MAX_FEC_ERRORS: Final = 64
"""One more than the errors that an NVLink can correct in a block; NVML reports 0 to 15."""
MAX_UNRESPONSIVE_NODES: Final = 1_000
"""Unresponsive nodes per partition that a watermark names; it counts all of them."""
MAX_BOOTS: Final = 64
"""Remembered boots of a node; there are usually a few."""

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
    """Return the constraint for a list or mapping of at most `length` items."""
    return msgspec.Meta(max_length=length)
