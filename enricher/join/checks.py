"""What a well-formed tick must still hold so that it can be booked.

Types are checked by decoding; here stand the rules between fields. Nothing is repaired.
"""

from gpuledger.records import NodeSample


def explain_invalid(sample: NodeSample) -> str | None:
    """Name the field, the value and the rule of the first rule that the tick breaks, if any."""
    if sample.interval_ns <= 0:
        return f"field interval_ns: {sample.interval_ns} is no positive length of time"
    gpus, containers = len(sample.gpus), len(sample.containers)
    for process in sample.processes:
        container = process.container
        if process.gpu >= gpus or (container is not None and container >= containers):
            return _explain_position(sample)
    return None


def _explain_position(sample: NodeSample) -> str | None:
    tables = {"gpu": len(sample.gpus), "container": len(sample.containers)}
    for place, process in enumerate(sample.processes):
        for name, size in tables.items():
            position = getattr(process, name)
            if position is not None and position >= size:
                field = f"field processes[{place}].{name}"
                return f"{field}: {position} is no position in {name}s ({size})"
    return None
