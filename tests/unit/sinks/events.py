"""Any event that a join could publish, for laws about data derived from events."""

from typing import TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from gpuledger.records import (
    BusyMethod,
    Category,
    EnergyMethod,
    Entry,
    GpuBooks,
    GpuEvent,
    LateAdjustment,
    MemoryMethod,
    PodState,
)
from gpuledger.records.base import MAX_VALUE_LENGTH, OpenEnum
from gpuledger.records.bounds import MAX_MILLIJOULES
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    container,
    event,
    holder,
    pod,
    reading,
    settlement,
)

_CONTAINER = st.builds(
    container,
    pod_uid=st.sampled_from(["uid-train", "uid-stranger", None]),
    container_id=st.sampled_from(["c" * 64, "d" * 64, None]),
)
# Up to 64 bits; sums and products exceed that.
_QUANTITY = st.none() | st.integers(0, 2**63 - 1)
_TIME = st.none() | st.integers(-(2**63), 2**63 - 1)
_RATIO = st.none() | st.integers(0, 10**6).map(lambda millionths: millionths / 10**6)
_Open = TypeVar("_Open", bound=OpenEnum)


def _words(of: type[_Open]) -> st.SearchStrategy[_Open]:
    """Return the members of an enumeration, and any value that a newer version may have added."""
    unknown = st.text(st.characters(codec="utf-8"), min_size=1, max_size=MAX_VALUE_LENGTH)
    return st.sampled_from(of) | unknown.map(of)


@st.composite
def _entries(draw: st.DrawFn) -> Entry:
    category = draw(_words(Category))
    is_pod, is_idle = category is Category.POD, category is Category.IDLE
    holder = draw(st.none() | st.integers(0, 1)) if is_idle else None
    has_job = category is Category.JOB or (is_idle and holder is None)
    return Entry(
        category=category,
        container=draw(_CONTAINER) if is_pod else None,
        busy_ns=draw(_TIME),
        memory_bytes=draw(_QUANTITY),
        energy_millijoules=draw(_QUANTITY),
        allocation=holder,
        job_id=draw(st.sampled_from([None, "7", "1234[5].server"])) if has_job else None,
        allocation_unknown=draw(st.sampled_from([None, True])) if is_idle else None,
    )


@st.composite
def _late_adjustments(draw: st.DrawFn, gpus: int) -> LateAdjustment:
    busy_ns = draw(st.integers(0, 10**15))
    owed = Entry(category=Category.HOST, busy_ns=busy_ns)
    return settlement(
        busy_ns,
        draw(st.sampled_from([None, owed, replace(owed, category=Category.JOB, job_id="7")])),
        busy_method=draw(_words(BusyMethod)),
        gpu=draw(st.integers(0, gpus - 1)),
        from_time_ns=START_NS - draw(st.integers(0, 100 * SECOND_NS)),
    )


@st.composite
def events(draw: st.DrawFn) -> GpuEvent:
    """Draw an event of up to three GPUs with up to five entries each, and some late adjustments."""
    gpus = [
        GpuBooks(
            reading=reading(
                uuid=f"GPU-{number}",
                index=number,
                model=draw(st.sampled_from(["NVIDIA H100 80GB HBM3", None])),
                sm_active_ratio=draw(_RATIO),
                tensor_active_ratio=draw(_RATIO),
                dram_active_ratio=draw(_RATIO),
                energy_total_millijoules=draw(st.none() | st.integers(0, MAX_MILLIJOULES)),
            ),
            entries=draw(st.lists(_entries(), max_size=5)),
            busy_method=draw(st.none() | _words(BusyMethod)),
            memory_method=draw(st.none() | _words(MemoryMethod)),
            energy_method=draw(st.none() | _words(EnergyMethod)),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    return event(
        gpus=gpus,
        pods=draw(st.sampled_from([[], [pod()], [pod(state=PodState("a_state_of_tomorrow"))]])),
        allocated_to=[holder(), holder("chat-0")],
        time_ns=START_NS + draw(st.integers(0, 10 * SECOND_NS)),
        interval_ns=draw(st.integers(0, 10 * SECOND_NS)),
        late=draw(st.sampled_from([None, True])),
        gap_ns=draw(st.none() | st.integers(0, 10**15)),
        late_adjustments=draw(st.none() | st.lists(_late_adjustments(len(gpus)), max_size=3))
        if gpus
        else None,
    )
