"""Benchmarks of the project's cost. Each `bench_*.py` is one benchmark; none is product code.

A benchmark is a module with `NAME`, a docstring whose first line names the measured quantity and
its reference, and `run()`, which yields each figure as soon as it is known.
"""
