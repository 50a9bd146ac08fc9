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
MAX_JOULES: Final = 2**62 / 1000
"""What a counter of millijoules in 64 bits may show (`nvmlDeviceGetTotalEnergyConsumption`)."""
MAX_INTERVAL_SECONDS: Final = 86_400 + 3_600
"""A day and an hour. A tick comes a minute after the one before at most (`tick_seconds`), but where
no GPU answered it covers the time since one did, until the agent ends after `watchdog_seconds`, a
day at most; the hour is for a machine that is slow. How long a tick then waits in the spool adds
nothing to what it covers. The agent begins anew after an interval that is longer still."""
MAX_INTERVAL_NS: Final = MAX_INTERVAL_SECONDS * 10**9
"""`MAX_INTERVAL_SECONDS` in nanoseconds, as ticks have it."""
MAX_BOOTTIME_NS: Final = MAX_SEQ * 10**6
"""`MAX_SEQ`, ten years, in nanoseconds: no process started later after the boot of its node."""
MAX_PID: Final = 2**22
"""The kernel's own limit on 64-bit machines (`PID_MAX_LIMIT`)."""
MAX_TICK_JOULES: Final = MAX_WATTS * MAX_INTERVAL_SECONDS
"""`MAX_WATTS` for the longest interval of a tick."""
MIN_CELSIUS: Final = -20
MAX_CELSIUS: Final = 150
"""Boards are specified for 0 to 50 °C around them and shut down by about 105 °C (memory)."""
MAX_HERTZ: Final = 20_000_000_000
"""GDDR7, the fastest clock that NVML tells, has 16 GHz at most as it counts."""
MAX_MEMORY_BYTES: Final = 2**48
"""256 TiB: what a 48-bit address, NVIDIA's virtual one until Blackwell, can name."""
MAX_FAN_RATIO: Final = 10.0
"""NVML's header: the speed is of the one that fans are meant to run at, and may exceed 100 %."""
MAX_SECONDS: Final = 100 * 366 * 86_400
"""A century."""
MAX_BYTES_PER_SECOND: Final = 2**44
"""16 TiB/s: NVLink 5 has 1.8 TB/s a GPU, both directions together."""
MAX_PERFORMANCE_STATE: Final = 15
"""NVML's `nvmlPstates_t`: P0 to P15."""

IntervalNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTERVAL_NS)]
BoottimeNs = Annotated[int, msgspec.Meta(ge=0, le=MAX_BOOTTIME_NS)]
Pid = Annotated[int, msgspec.Meta(ge=0, le=MAX_PID)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
FanRatio = Annotated[float, msgspec.Meta(ge=0, le=MAX_FAN_RATIO)]
Watts = Annotated[float, msgspec.Meta(ge=0, le=MAX_WATTS)]
Joules = Annotated[float, msgspec.Meta(ge=0, le=MAX_JOULES)]
TickJoules = Annotated[float, msgspec.Meta(ge=0, le=MAX_TICK_JOULES)]
Celsius = Annotated[int, msgspec.Meta(ge=MIN_CELSIUS, le=MAX_CELSIUS)]
Hertz = Annotated[int, msgspec.Meta(ge=0, le=MAX_HERTZ)]
MemoryBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_MEMORY_BYTES)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
# Summed over the GPUs of a process, of which no machine has as many.
GpuSeconds = Annotated[float, msgspec.Meta(ge=0, le=1024 * MAX_SECONDS)]
BytesPerSecond = Annotated[float, msgspec.Meta(ge=0, le=MAX_BYTES_PER_SECOND)]
PerformanceState = Annotated[int, msgspec.Meta(ge=0, le=MAX_PERFORMANCE_STATE)]
