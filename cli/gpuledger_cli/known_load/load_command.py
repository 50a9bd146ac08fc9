"""`gpuledger load`: options, and the printed result."""

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from cyclopts import App, Parameter

from gpuledger.clock import NS_PER_MS, NS_PER_SECOND
from gpuledger.errors import ArgumentError, UserError
from gpuledger.time_ranges import write_moment
from gpuledger_cli.known_load.cuda_load import load_gpu
from gpuledger_cli.known_load.request import LoadRequest, LoadResult
from gpuledger_cli.known_load.simulated_load import SimulatedLoad, room_bytes
from gpuledger_cli.long_work import run_cancellable
from gpuledger_cli.option_help import duration_option, epilogue, limits, parse_seconds

Format = Literal["text", "json"]
_SCENARIO: Final = Path("gpuledger-load.yaml")
_MIB: Final = 1 << 20
_MAX_PROCESSES: Final = 16
app = App(
    name="load",
    help_format="plaintext",
    help_epilogue=epilogue(
        "In each 100 ms, kernels of one thread run for the requested share. The GPU is then busy,"
        " but profiling metrics such as SM active stay low. Other programs on the GPU change the"
        " load. Ctrl-C and SIGTERM end it early; the result covers the time until then.",
        examples={
            "On a machine with a GPU, for two minutes": (
                "gpuledger load --utilization 40 --memory-mib 4096 --for 2m"
            ),
            "On any machine, for a simulated GPU": (
                "gpuledger load --simulated --utilization 40 --processes 2"
            ),
        },
    ),
)


@app.default
def load(
    *,
    utilization: Annotated[
        float, Parameter(help="Percentage of time in which a kernel runs, 1 to 100.")
    ] = 50.0,
    memory_mib: Annotated[int, Parameter(help="GPU memory of each process, in MiB.")] = 1024,
    processes: Annotated[
        int, Parameter(help=f"Number of processes that share the load, 1 to {_MAX_PROCESSES}.")
    ] = 1,
    for_: Annotated[str, duration_option("Duration", name="--for", forms=limits(1))] = "1m",
    gpu: Annotated[int, Parameter(help="Index of the GPU, as in nvidia-smi.")] = 0,
    simulated: Annotated[
        bool,
        Parameter(
            help="Write a scenario, and print the command of an agent that plays it.", negative=()
        ),
    ] = False,
    scenario: Annotated[Path, Parameter(help="Scenario file that --simulated writes.")] = _SCENARIO,
    format: Annotated[Format, Parameter(help="Format of the result.")] = "text",  # noqa: A002  # the option's name
) -> None:
    """Put a known load on a GPU, and print the values that a monitor should show."""
    for option, value, minimum, maximum in (
        ("--utilization", utilization, 1, 100),
        ("--memory-mib", memory_mib, 1, 1 << 20),
        ("--processes", processes, 1, _MAX_PROCESSES),
    ):
        if not minimum <= value <= maximum:
            raise ArgumentError(option, f"invalid value {value}; it must be {minimum} to {maximum}")
    if gpu < 0 or (simulated and gpu):
        limit = "--simulated has only GPU 0" if simulated else "it must be 0 or more"
        raise ArgumentError("--gpu", f"invalid value {gpu}; {limit}")
    request = LoadRequest(
        gpu=gpu,
        busy_ratio=utilization / 100,
        process_bytes=memory_mib * _MIB,
        processes=processes,
        seconds=parse_seconds(for_, option="--for", minimum=1),
    )
    result = _simulate(request, scenario) if simulated else load_gpu(request)
    if format == "json":
        sys.stdout.write(f"{msgspec.json.encode(result).decode()}\n")
        return
    start, end = (write_moment(one // NS_PER_MS) for one in (result.start_ns, result.end_ns))
    sys.stdout.write(
        f"A monitor should show, from {start} to {end}:\n"
        f"  {result.gpu_uuid}: busy {sum(result.busy_ratios.values()):.1%}, memory"
        f" {memory_mib * processes} MiB\n"
    )
    for pid, ratio in result.busy_ratios.items():
        sys.stdout.write(f"  process {pid}: busy {ratio:.1%}, memory {memory_mib} MiB\n")
    if not simulated:
        sys.stdout.write("Each process also has a CUDA context, of a few hundred MiB.\n")


def _simulate(request: LoadRequest, file: Path) -> LoadResult:
    largest = room_bytes() // request.processes
    if request.process_bytes > largest:
        raise ArgumentError(
            "--memory-mib",
            f"invalid value {request.process_bytes // _MIB}; the simulated GPU has room for"
            f" {largest // _MIB} in each process",
        )
    played = SimulatedLoad(request, epoch_ns=time.time_ns())
    try:
        command = played.write(file.absolute())
    except OSError as error:
        raise UserError(f"--scenario: cannot write {file}: {error.strerror}") from error
    sys.stderr.write(f"Start an agent now:\n  {command}\n")
    with suppress(KeyboardInterrupt):
        run_cancellable(asyncio.sleep(request.seconds))
    return played.result(min(request.seconds, (time.time_ns() - played.epoch_ns) / NS_PER_SECOND))
