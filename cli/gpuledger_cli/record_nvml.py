"""`gpuledger record-nvml`: records the results of NVML and `/proc` that the agent reads.

The command runs the agent without a bus. Afterwards it makes calls that the agent does not make, to
learn more about the hardware; see `gpuledger_cli.nvml_probes`.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Final, TypeVar, cast

import pynvml
from cyclopts import App, Parameter

from gpuledger.errors import UnavailableError, UserError
from gpuledger.runtime import Readiness, configure_logs
from gpuledger.runtime.tasks import end_tasks
from gpuledger.settings import LogSettings
from gpuledger_agent.context import Host, run_agent
from gpuledger_agent.gpu.nvidia.device_client import call_nvml
from gpuledger_agent.gpu.nvidia.library import NvmlLibrary
from gpuledger_agent.gpu.nvidia.session import NvmlSession
from gpuledger_agent.gpu.nvidia.system_library import SystemNvml, with_own_lists
from gpuledger_agent.gpu.threads import CallThread
from gpuledger_agent.recording.format import RecordingHeader
from gpuledger_agent.recording.recorder import (
    Recorder,
    RecordingLibrary,
    RecordingProcfs,
    Redactor,
)
from gpuledger_agent.settings import AgentSettings
from gpuledger_agent.source_selection import find_only_node, find_source
from gpuledger_cli.nvml_probes import PROBE_SECONDS, CallHangsError, probe_all
from gpuledger_cli.option_help import duration_option, epilogue, limits, parse_seconds

_OUT: Final = Path("nvml-recording.jsonl.gz")
_NODE: Final = "recorded"
# An unused GPU may have to wake up first, which takes seconds.
_HANG_SECONDS: Final = 30.0
_WAIT_SECONDS: Final = 0.2
T = TypeVar("T")


app = App(
    name="record-nvml",
    help_format="plaintext",
    help_epilogue=epilogue(
        "The file has every NVML call of the agent with its result, and the files of /proc that it"
        " read. Nothing is sent, and nothing on the machine is changed.",
        examples={
            "A minute, without names that identify you": (
                "gpuledger record-nvml --redact --output node.jsonl.gz"
            ),
            "Play it on any machine": "gpuledger agent --source recorded:node.jsonl.gz",
        },
        codes={2: "NVML is unavailable, the file cannot be written, or invalid input"},
    ),
)


@app.default
def record_nvml(
    *,
    for_: Annotated[
        str, duration_option("How long to record, before the probes", name="--for", forms=limits(1))
    ] = "60s",
    interval: Annotated[str, duration_option("Sampling interval", forms=limits(0.25, 60))] = "1s",
    output: Annotated[
        Path, Parameter(help="File to write; compressed if its name ends in .gz.")
    ] = _OUT,
    redact: Annotated[
        bool,
        Parameter(
            help="Replace UUIDs, serial numbers, PCI addresses, container ids, pod ids and program"
            " names by pseudonyms.",
            negative=(),
        ),
    ] = False,
    probes: Annotated[
        bool,
        Parameter(
            help="Make calls that the agent does not need, to learn about the driver: about"
            f" {PROBE_SECONDS:.0f} s for each GPU, after --for. --no-probes skips them."
        ),
    ] = True,
    source: Annotated[
        str, Parameter(help="GPU data source: auto, nvml or simulated[:FILE], as for the agent.")
    ] = "auto",
    node: Annotated[
        str | None,
        Parameter(help="Node of the scenario to record; required if it has several."),
    ] = None,
) -> None:
    """Record what NVML returns on this machine, to replay it on another."""
    seconds = parse_seconds(for_, option="--for", minimum=1)
    interval_seconds = parse_seconds(interval, option="--interval", minimum=0.25, maximum=60)
    configure_logs(LogSettings(level="error"))
    try:
        named = node or find_only_node(source) or _NODE
        settings = AgentSettings(
            source=source, sampling_interval_seconds=interval_seconds, node_name=named
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if source.startswith("recorded:"):
        raise UserError(
            "--source: a recording cannot be recorded again; give nvml or simulated[:FILE]"
        )
    found = find_source(settings)
    if not isinstance(found.gpus, NvmlSession):
        raise UserError(f"--source {source}: no NVML to record; give nvml or simulated[:FILE]")
    nvml = found.gpus.library
    write = Redactor().write if redact else None
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stopped_by_sigterm())
        try:
            header = _header(found, nvml, settings, stop, is_redacted=redact)
        except _StoppedError:
            return
        recorder = stack.enter_context(
            contextlib.closing(Recorder(output, header, found.clock, redact=write))
        )
        library = RecordingLibrary(with_own_lists(nvml), recorder)
        # The agent makes the calls, so that the recording has what an agent needs, in its order.
        recorded = replace(
            found,
            gpus=NvmlSession(library, monotonic_ns=found.clock.monotonic_ns),
            procfs=RecordingProcfs(found.procfs, recorder),
        )
        # The agent runs before the probes, so that a call that crashes the driver costs no tick.
        asyncio.run(_run(recorded, settings, recorder, seconds, stop))
        recorder.flush()
        if probes and not recorder.has_failed:
            recorder.is_probing = True
            _probe(library, stop)
    _print(f"{output}: {recorder.lines} calls, {output.stat().st_size} bytes; play it with:")
    _print(f"  gpuledger agent --source recorded:{output}")


class _StoppedError(Exception):
    """SIGTERM has been received."""


class _Stop:
    """Whether SIGTERM has been received."""

    has_come = False


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[_Stop]:
    """Yield a flag that SIGTERM sets, so that the file ends with a whole line."""
    stop = _Stop()

    def take(*_: object) -> None:
        stop.has_come = True

    before = signal.signal(signal.SIGTERM, take)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


class _WatchedLibrary:
    """Passes calls to a library, and raises _StoppedError after SIGTERM.

    `run` makes the calls in a thread, which is abandoned if a call hangs.
    """

    def __init__(self, library: object, stop: _Stop) -> None:
        self._library = library
        self._stop = stop
        self._calling: tuple[str, float] | None = None
        """The call that has not returned yet, and when it began."""

    def __getattr__(self, name: str) -> object:
        # Checked between calls, because a running call cannot be cancelled.
        if self._stop.has_come:
            raise _StoppedError
        found = getattr(self._library, name)

        def call(*arguments: object) -> object:
            calling = self._calling = name, time.monotonic()
            try:
                return found(*arguments)
            finally:
                # An abandoned call may return while another one is running.
                if self._calling is calling:
                    self._calling = None

        return call

    def run(self, do: Callable[[], T], /) -> T:
        """Return the result of `do`.

        Raises CallHangsError if a call does not return in time, and _StoppedError after SIGTERM.
        """
        thread = CallThread("probe")
        doing = thread.start(do)
        thread.end()
        while not doing.done():
            wait([doing], timeout=_WAIT_SECONDS)
            calling = self._calling
            if doing.done():
                break
            if self._stop.has_come:
                raise _StoppedError
            if calling and time.monotonic() - calling[1] > _HANG_SECONDS:
                self._calling = None
                raise CallHangsError(f"{calling[0]} has not returned for {_HANG_SECONDS:.0f} s")
        return doing.result()


def _probe(library: object, stop: _Stop) -> None:
    """Make the probes and print the findings; a call that hangs ends the probes."""
    watched = _WatchedLibrary(library, stop)
    with contextlib.suppress(_StoppedError):
        try:
            findings = probe_all(watched, report=_print, run=watched.run)
        except CallHangsError as error:
            findings = [str(error)]
        for finding in findings:
            _print(f"found: {finding}")


def _header(
    source: Host,
    nvml: object,
    settings: AgentSettings,
    stop: _Stop,
    *,
    is_redacted: bool,
) -> RecordingHeader:
    driver, library, gpus = _describe(nvml, stop)
    return RecordingHeader(
        time_ns=source.clock.time_ns(),
        monotonic_ns=source.clock.monotonic_ns(),
        boottime_ns=source.clock.boottime_ns(),
        sampling_interval_seconds=settings.sampling_interval_seconds,
        is_simulated=not isinstance(nvml, SystemNvml),
        is_redacted=is_redacted,
        driver_version=driver,
        nvml_version=library,
        nvidia_ml_py_version=metadata.version("nvidia-ml-py"),
        gpus=gpus,
    )


def _describe(nvml: object, stop: _Stop) -> tuple[str | None, str | None, list[str]]:
    """Return driver version, library version and GPU names; raises UserError without NVML."""
    watched = _WatchedLibrary(nvml, stop)
    try:
        watched.run(cast("NvmlLibrary", watched).nvmlInit)
    except (pynvml.NVMLError, CallHangsError) as error:
        raise UserError(
            f"cannot start NVML: {error}; check that the NVIDIA driver is loaded"
        ) from error
    driver = watched.run(partial(_version, watched, NvmlLibrary.nvmlSystemGetDriverVersion))
    version = watched.run(partial(_version, watched, NvmlLibrary.nvmlSystemGetNVMLVersion))
    names: list[str] = []
    hangs = False
    for index in range(watched.run(cast("NvmlLibrary", watched).nvmlDeviceGetCount)):
        try:
            names.append(watched.run(partial(_name, watched, index)))
        except CallHangsError as error:
            names.append("?")
            _print(f"GPU {index}: {error}")
            hangs = True
    # While a call hangs, the shutdown could hang as well.
    if not hangs:
        watched.run(cast("NvmlLibrary", watched).nvmlShutdown)
    return driver, version, names


def _name(nvml: object, index: int) -> str:
    """Return a GPU's product name; `?` if the driver does not return it."""
    with contextlib.suppress(UnavailableError):
        handle = call_nvml(nvml, NvmlLibrary.nvmlDeviceGetHandleByIndex, index)
        return call_nvml(nvml, NvmlLibrary.nvmlDeviceGetName, handle) or "?"
    return "?"


def _version(nvml: object, function: Callable[[NvmlLibrary], str]) -> str | None:
    """Return a version; `None` if the driver does not return it."""
    with contextlib.suppress(UnavailableError):
        return call_nvml(nvml, function)
    return None


async def _run(
    source: Host, settings: AgentSettings, recorder: Recorder, seconds: float, stop: _Stop
) -> None:
    """Run the agent for a while, and report progress."""
    agent = asyncio.create_task(
        run_agent(
            host=source,
            bus=None,
            settings=settings,
            readiness=Readiness(),
        )
    )
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0 and not (
            agent.done() or stop.has_come or recorder.has_failed
        ):
            _print(f"recording: {left:.0f} s left, {recorder.lines} calls", is_progress=True)
            await asyncio.wait([agent], timeout=min(left, 1.0))
        if agent.done():
            agent.result()
    finally:
        await end_tasks(agent)
        _print(f"recording: done, {recorder.lines} calls")


def _print(line: str, *, is_progress: bool = False) -> None:
    """Write a line to standard error; on a terminal, progress overwrites the same line."""
    if is_progress and not sys.stderr.isatty():
        return
    # On a terminal the previous progress line is erased first, because it may be longer.
    fresh = "\r\033[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{fresh}{line}" if is_progress else f"{fresh}{line}\n")
    sys.stderr.flush()
