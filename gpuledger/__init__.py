"""What all share: records, topics, bus, settings, service lifecycle. Knows no deployable."""

from importlib.metadata import version

__version__ = version("gpuledger")
