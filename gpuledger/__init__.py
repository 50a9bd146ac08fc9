"""What all share: records, topics, bus, settings, service lifecycle. Knows no deployable."""

TYPE_CHECKING = False  # typing's own would have to be imported, and all wait for this
if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Return `__version__` when it is asked for: reading it imports a good deal."""
        if name != "__version__":
            raise AttributeError(name)
        from importlib.metadata import version  # noqa: PLC0415  # see above

        return version("gpuledger")
