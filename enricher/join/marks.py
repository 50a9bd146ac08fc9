"""The last tick booked of each node, so that a tick that comes twice is booked once.

Pure state of a worker; it is forgotten with the partition.
"""


class HighWaterMarks:
    """For each node the boot and the `seq` of the last tick booked; bounded by the nodes."""

    def __init__(self) -> None:
        self._marks: dict[int, dict[str, tuple[str, int]]] = {}

    def advance(self, partition: int, node: str, boot_id: str, seq: int) -> bool:
        """Say whether this tick is new, and remember it if so.

        `seq` rises within a boot and starts again with the next one.
        """
        marks = self._marks.setdefault(partition, {})
        mark = marks.get(node)
        if mark is not None and mark[0] == boot_id and seq <= mark[1]:
            return False
        marks[node] = (boot_id, seq)
        return True

    def forget(self, partition: int) -> None:
        """Forget the nodes of a partition that is no longer held."""
        self._marks.pop(partition, None)
