"""Any event that a join could make, for laws about what is made of events."""

from hypothesis import strategies as st

from gpuledger.records import Account, Entry, GpuBooks, GpuEvent, Method, Settlement
from tests.unit.sinks.builders import (
    SECOND_NS,
    START_NS,
    allocation,
    container,
    event,
    pod,
    reading,
    settlement,
)

_CONTAINER = st.builds(
    container,
    pod_uid=st.sampled_from(["uid-train", "uid-stranger", None]),
    container_id=st.sampled_from(["c" * 64, "d" * 64, None]),
)
_QUANTITY = st.none() | st.floats(0, 1e15, allow_nan=False)
_RATIO = st.none() | st.floats(0, 1, allow_nan=False)


@st.composite
def _entries(draw: st.DrawFn) -> Entry:
    account = draw(st.sampled_from(Account))
    is_pod, is_idle = account is Account.POD, account is Account.IDLE
    return Entry(
        account=account,
        method=draw(st.sampled_from(Method)),
        container=draw(_CONTAINER) if is_pod else None,
        busy_seconds=draw(_QUANTITY),
        memory_byte_seconds=draw(_QUANTITY),
        joules=draw(_QUANTITY),
        allocation=draw(st.none() | st.integers(0, 1)) if is_idle else None,
    )


@st.composite
def _settlements(draw: st.DrawFn, gpus: int) -> Settlement:
    seconds = draw(st.floats(0, 1e6))
    owed = Entry(account=Account.HOST, method=Method.ACCOUNTING, busy_seconds=seconds)
    return settlement(
        seconds,
        draw(st.sampled_from([None, owed])),
        gpu=draw(st.integers(0, gpus - 1)),
        from_time_ns=START_NS - draw(st.integers(0, 100 * SECOND_NS)),
    )


@st.composite
def events(draw: st.DrawFn) -> GpuEvent:
    """Draw an event of up to three GPUs with up to five entries each, and some settlements."""
    gpus = [
        GpuBooks(
            reading=reading(
                uuid=f"GPU-{number}",
                index=number,
                model=draw(st.sampled_from(["NVIDIA H100 80GB HBM3", None])),
                sm_active_ratio=draw(_RATIO),
                tensor_active_ratio=draw(_RATIO),
                dram_active_ratio=draw(_RATIO),
                energy_total_joules=draw(_QUANTITY),
            ),
            entries=draw(st.lists(_entries(), max_size=5)),
        )
        for number in range(draw(st.integers(0, 3)))
    ]
    return event(
        gpus=gpus,
        pods=draw(st.sampled_from([[], [pod()]])),
        allocations=[allocation(), allocation(pod="chat-0", container="serve")],
        time_ns=START_NS + draw(st.integers(0, 10 * SECOND_NS)),
        interval_ns=draw(st.integers(0, 10 * SECOND_NS)),
        late=draw(st.sampled_from([None, True])),
        gap_ns=draw(st.none() | st.integers(0, 10**15)),
        settlements=draw(st.none() | st.lists(_settlements(len(gpus)), max_size=3))
        if gpus
        else None,
    )
