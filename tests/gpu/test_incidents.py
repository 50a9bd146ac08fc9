"""The driver's events on this machine: an event set can be created, waited for and freed.

With `GPULEDGER_PROVOKE_XID=1` a separate process causes a memory fault, whose event must arrive.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import pynvml
import pytest

from gpuledger.clock import SystemClock
from gpuledger.runtime import Backoff
from gpuledger_agent.core.incidents import Detection
from gpuledger_agent.gpu.event_thread import EventThread
from gpuledger_agent.gpu.nvidia.events import NvmlGpuEvents
from gpuledger_agent.gpu.nvidia.session import NvidiaGpu, NvmlSession
from gpuledger_agent.gpu.protocol import SourceLostError
from gpuledger_agent.metrics import EVENT_SET_FAILURES
from tests.metric_values import value_of

ROOT = Path(__file__).parents[2]
APPLICATION_XIDS = {13, 31, 43, 45}


@pytest.fixture(scope="module")
def gpus() -> Iterator[Sequence[NvidiaGpu]]:
    nvml = NvmlSession(pynvml)
    try:
        found = nvml.open()
    except SourceLostError as error:
        pytest.skip(f"no usable GPU: {error}")
    yield found
    nvml.close()


@pytest.fixture
def events(gpus: Sequence[NvidiaGpu]) -> Iterator[NvmlGpuEvents]:
    made = NvmlGpuEvents(pynvml, gpus, clock=SystemClock())
    yield made
    made.close()


def test_a_wait_ends_in_time_and_finds_out_which_version_the_driver_has(
    events: NvmlGpuEvents, record_property: Callable[[str, object], None]
) -> None:
    began = time.monotonic()
    seen = events.wait(200)
    waited_seconds = time.monotonic() - began

    record_property("has_nvmlEventSetWait_v3", events.has_v3)
    assert seen is None or seen.gpu_uuid.startswith("GPU-")
    assert waited_seconds < 1
    assert events.has_v3 is not None


def test_every_gpu_is_registered(gpus: Sequence[NvidiaGpu]) -> None:
    failures = EVENT_SET_FAILURES.labels(reason="register")
    before = value_of(failures)
    NvmlGpuEvents(pynvml, gpus, clock=SystemClock()).close()
    assert value_of(failures) == before


def test_the_thread_releases_the_driver_within_a_second(gpus: Sequence[NvidiaGpu]) -> None:
    seen: SimpleQueue[Detection] = SimpleQueue()
    thread = EventThread(
        NvmlSession(pynvml), gpus, clock=SystemClock(), on_detection=seen.put, backoff=Backoff()
    )
    time.sleep(0.5)
    assert thread.end(1.0)


@pytest.mark.skipif(
    os.environ.get("GPULEDGER_PROVOKE_XID") != "1", reason="GPULEDGER_PROVOKE_XID is not 1"
)
def test_a_memory_fault_arrives_as_an_event_with_its_gpu_and_time(
    events: NvmlGpuEvents, gpus: Sequence[NvidiaGpu], record_property: Callable[[str, object], None]
) -> None:
    began_ns = time.time_ns()
    message = subprocess.run(
        [sys.executable, "-m", "tests.gpu.fault"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    give_up = time.monotonic() + 10
    found = None
    while found is None and time.monotonic() < give_up:
        found = events.wait(500)

    assert "cuCtxSynchronize" in message
    assert found is not None
    record_property("event", str(found))
    assert found.xid in APPLICATION_XIDS
    assert found.gpu_uuid in {gpu.uuid for gpu in gpus}
    assert began_ns - 1_000_000_000 <= found.time_ns <= time.time_ns()
