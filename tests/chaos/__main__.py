"""Disturb an installation, count lost and duplicated time: `python -m tests.chaos`.

First a random run: a real Kafka, a real API server, podwatch and workers of the join as processes,
and agents that publish one tick per second each, all killed, stopped and restarted. It prints a
verdict in one line. Then single faults, one after another, on a small installation with a store:
each line shows what was stored, and which alerts fire if the fault lasts (`tests/chaos/faults.py`).
The exit code is 1 if a tick was lost or booked twice, or if a fault differs from its table.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gpuledger.errors import UnavailableError
from tests.chaos.chaos_run import ChaosRun, Plan
from tests.chaos.faults import BY_NAME, FAULTS
from tests.chaos.installation import FaultCluster
from tests.chaos.parts import RealParts
from tests.chaos.single_faults import SingleFaults
from tests.compiled import describe_compiled
from tests.real.services.process import PartError
from tests.tools import catalogue
from tests.tools.errors import MissingToolError
from tests.tools.report import print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.faults import Fault

KEPT, BROKEN, MISUSED = 0, 1, 2
BROKEN_OFF = 130
_ALL, _NONE = "all", "none"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos test; return the exit code."""
    options = _parser().parse_args(arguments)
    stray = sorted(name for name in os.environ if name.startswith("GPULEDGER_"))
    if stray:
        sys.stderr.write(f"unset {', '.join(stray)}: podwatch and join would read them\n")
        return MISUSED
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = options.fault
    del options.fault
    try:
        is_kept = _run(Plan(**vars(options))) if chosen in (None, [_NONE]) else True
        is_kept &= _run_faults(_faults_of(chosen or [_ALL]))
    except (UnavailableError, PartError) as error:
        sys.stderr.write(f"not run: {error}\n")
        return MISUSED
    except KeyboardInterrupt:
        sys.stderr.write("broken off\n")
        return BROKEN_OFF
    return KEPT if is_kept else BROKEN


def _faults_of(names: Sequence[str]) -> Sequence[Fault]:
    return FAULTS if _ALL in names else [BY_NAME[name] for name in names if name != _NONE]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of disturbance (default: 300)"
    )
    parser.add_argument("--rate", type=int, default=1_000, help="ticks per second (default: 1000)")
    parser.add_argument(
        "--workers", type=int, choices=(2, 3, 4), default=3, help="workers of the join (default: 3)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the plan of actions (default: 1)")
    parser.add_argument(
        "--drain-seconds", type=float, default=120.0, help="how long to wait for events at the end"
    )
    parser.add_argument(
        "--fault",
        action="append",
        choices=(*BY_NAME, _ALL, _NONE),
        metavar="NAME",
        help="run this fault instead of the random run; repeat the option for several, or give"
        f" `all`; `none` runs only the random run (default: both). Names: {', '.join(BY_NAME)}",
    )
    return parser


def _run(plan: Plan) -> bool:
    """Run in a folder that is kept if a promise was broken; return whether all were kept."""
    folder = Path(tempfile.mkdtemp(prefix="gpuledger-chaos-"))
    # Messages of libraries about an unavailable broker would drown the progress.
    logging.basicConfig(filename=folder / "chaos.log", force=True)
    print_line(f"{plan}; {describe_compiled()}; logs in {folder}")
    run = ChaosRun(plan, promtool=_promtool(), folder=folder, print_line=print_line)
    verdict = asyncio.run(run.run())
    print_line(verdict.as_line())
    if verdict.is_kept:
        shutil.rmtree(folder, ignore_errors=True)
        return True
    for alert in verdict.alerts:
        print_line(f"!!! fires: {alert}")
    for example in verdict.examples:
        print_line(f"!!! {example}")
    if verdict.strange:
        print_line(f"!!! {verdict.strange} events of ticks that were not published")
    return False


def _run_faults(faults: Sequence[Fault]) -> bool:
    """Run faults in a folder that is kept if one differs; return whether all are as required."""
    if not faults:
        return True
    # A short path, because sockets of the parts lie in it.
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    logging.basicConfig(filename=folder / "chaos.log", force=True)
    print_line(f"{len(faults)} faults; logs in {folder}")
    cluster = FaultCluster(RealParts(folder / "shared"), folder=folder / "shared")
    runs = SingleFaults(cluster, promtool=_promtool(), folder=folder, print_line=print_line)
    differ = asyncio.run(runs.run(faults))
    print_line(f"{len(faults)} faults, {len(differ)} differ from the table")
    if not differ:
        shutil.rmtree(folder, ignore_errors=True)
    return not differ


def _promtool() -> Path:
    try:
        return catalogue.named("promtool").find()
    except MissingToolError as error:
        raise UnavailableError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
