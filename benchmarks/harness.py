"""Finds the benchmarks and chooses among them. Knows no specific benchmark and prints nothing."""

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType

from benchmarks.figure import Figure
from gpuledger.errors import UserError

PREFIX = "bench_"


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A named source of figures."""

    name: str
    summary: str
    """One line: the measured quantity and its reference."""
    run: Callable[..., Iterator[Figure]]
    takes_seconds: bool = False
    """Whether `run` accepts `seconds`, the duration of the measurement."""


def discover(package: ModuleType) -> dict[str, Benchmark]:
    """Import every `bench_*` module of a package; return its benchmarks by name, sorted."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    modules = (
        importlib.import_module(f"{package.__name__}.{name}")
        for name in names
        if name.startswith(PREFIX)
    )
    benchmarks = [_benchmark(module) for module in modules]
    return {found.name: found for found in sorted(benchmarks, key=lambda found: found.name)}


def _benchmark(module: ModuleType) -> Benchmark:
    summary = (module.__doc__ or "").strip().partition("\n")[0]
    takes_seconds = "seconds" in inspect.signature(module.run).parameters
    return Benchmark(name=module.NAME, summary=summary, run=module.run, takes_seconds=takes_seconds)


def choose(names: Iterable[str], benchmarks: Mapping[str, Benchmark]) -> list[Benchmark]:
    """Return the named benchmarks in the given order; all of them if no name is given.

    Raises UserError, with the most similar names, for an unknown name.
    """
    wanted = list(dict.fromkeys(names)) or list(benchmarks)
    for name in wanted:
        if name not in benchmarks:
            raise UserError(_unknown(name, benchmarks))
    return [benchmarks[name] for name in wanted]


def measure_for(chosen: Iterable[Benchmark], seconds: float | None) -> list[Benchmark]:
    """Set the duration of the benchmarks; raises UserError if one does not accept a duration."""
    results = []
    for benchmark in chosen:
        if seconds is not None and not benchmark.takes_seconds:
            raise UserError(
                f"--seconds: {benchmark.name} measures a fixed number of items, not a duration"
            )
        run = benchmark.run if seconds is None else partial(benchmark.run, seconds=seconds)
        results.append(replace(benchmark, run=run))
    return results


def _unknown(name: str, benchmarks: Iterable[str]) -> str:
    known = list(benchmarks)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"no benchmark is named {name!r}; did you mean {' or '.join(near)}?"
    return f"no benchmark is named {name!r}; there are: {', '.join(known) or 'none'}"
