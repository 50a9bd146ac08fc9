"""Records the answers of a machine's NVML and `/proc` to a file, and replays them.

An agent that reads its own machine does not import this package.
"""
