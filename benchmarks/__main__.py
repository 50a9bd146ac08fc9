"""`python -m benchmarks`: the command line of the harness. Measures nothing itself."""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import benchmarks
from benchmarks.figure import Figure
from benchmarks.harness import Benchmark, choose, discover, measure_for
from gpuledger.errors import UnavailableError, UserError
from tests.compiled import describe_compiled

DONE, INCOMPLETE, MISUSED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run benchmarks; return 0, 1 if one could not be measured, or 2 for an invalid call."""
    options = _parser().parse_args(arguments)
    known = discover(benchmarks)
    try:
        chosen = measure_for(choose(options.names, known), options.seconds)
        _refuse_missing_folder(options.json)
    except UserError as error:
        print(error, file=sys.stderr)
        return MISUSED
    if options.list:
        return _list(chosen)
    return _measure(chosen, json_file=options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="a benchmark (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        metavar="N",
        help="duration of the measurement, for benchmarks that accept one",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the benchmarks without running them"
    )
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds < math.inf:
        raise ValueError(text)
    return seconds


def _refuse_missing_folder(file: Path | None) -> None:
    """Check early, so that a long run does not end in a file that cannot be written."""
    if file is not None and not file.absolute().parent.is_dir():
        raise UserError(f"--json {file}: missing directory: {file.parent}; create it first")


def _list(chosen: Iterable[Benchmark]) -> int:
    for benchmark in chosen:
        print(f"{benchmark.name:<16} {benchmark.summary}")
    return DONE


def _measure(chosen: Iterable[Benchmark], *, json_file: Path | None) -> int:
    figures: list[Figure] = []
    status = DONE
    print(describe_compiled(), flush=True)
    try:
        for benchmark in chosen:
            try:
                figures.extend(_shown(benchmark.run()))
            except UnavailableError as error:
                print(f"{benchmark.name}: not measured: {error}", file=sys.stderr)
                status = INCOMPLETE
    finally:
        # Figures are written even if the run fails.
        if json_file is not None:
            json_file.write_text(_json(figures), encoding="utf-8")
    return status


def _shown(figures: Iterable[Figure]) -> Iterator[Figure]:
    for figure in figures:
        print(figure.as_line(), flush=True)
        yield figure


def _json(figures: Iterable[Figure]) -> str:
    return json.dumps([figure.as_json() for figure in figures], indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
