"""Kill, stop and restart components, and count lost and duplicated ticks: `python -m tests.chaos`.

The run has a real Kafka, a real API server, podwatch and workers of the join as processes, and
agents that publish one tick per second each. It prints a verdict in one line; the exit code is 1 if
a tick was lost or booked twice.
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
from tests.chaos.tally import Verdict
from tests.compiled import describe_compiled
from tests.real.services.process import PartError
from tests.tools.report import print_line

if TYPE_CHECKING:
    from collections.abc import Sequence

KEPT, BROKEN, MISUSED = 0, 1, 2
BROKEN_OFF = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chaos test; return the exit code."""
    options = _parser().parse_args(arguments)
    stray = sorted(name for name in os.environ if name.startswith("GPULEDGER_"))
    if stray:
        sys.stderr.write(f"unset {', '.join(stray)}: podwatch and join would read them\n")
        return MISUSED
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        verdict = _run(Plan(**vars(options)))
    except (UnavailableError, PartError) as error:
        sys.stderr.write(f"not run: {error}\n")
        return MISUSED
    except KeyboardInterrupt:
        sys.stderr.write("broken off\n")
        return BROKEN_OFF
    print_line(verdict.as_line())
    return KEPT if verdict.is_kept else BROKEN


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
    return parser


def _run(plan: Plan) -> Verdict:
    """Run in a folder that is kept if a promise was broken."""
    folder = Path(tempfile.mkdtemp(prefix="gpuledger-chaos-"))
    # Messages of libraries about an unavailable broker would drown the progress.
    logging.basicConfig(filename=folder / "chaos.log", force=True)
    print_line(f"{plan}; {describe_compiled()}; logs in {folder}")
    verdict = asyncio.run(ChaosRun(plan, folder=folder, print_line=print_line).run())
    if verdict.is_kept:
        shutil.rmtree(folder, ignore_errors=True)
        return verdict
    for example in verdict.examples:
        print_line(f"!!! {example}")
    if verdict.strange:
        print_line(f"!!! {verdict.strange} events of ticks that were not published")
    return verdict


if __name__ == "__main__":
    sys.exit(main())
