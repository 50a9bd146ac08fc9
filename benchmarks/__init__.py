"""What the project costs, measured. Each `bench_*.py` here is one benchmark; none is product code.

A benchmark is a module with `NAME`, a docstring whose first line says what it measures and against
which reference, and `run()`, which yields each figure as soon as it is known.
"""
