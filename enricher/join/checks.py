"""What a well-formed tick must still hold so that it can be booked.

Types are checked by decoding; here stand the rules between fields. Nothing is repaired.
"""

from gpuledger.records import NodeSample


def explain_invalid(sample: NodeSample) -> str | None:
    """Name the field, the value and the rule of the first rule that the tick breaks, if any."""
    if sample.interval_ns <= 0:
        return f"field interval_ns: {sample.interval_ns} is no positive length of time"
    gpus, containers = len(sample.gpus), len(sample.containers)
    for place, process in enumerate(sample.processes):
        if not 0 <= process.gpu < gpus:
            return f"field processes[{place}].gpu: {process.gpu} is no position in gpus ({gpus})"
        container = process.container
        if container is not None and not 0 <= container < containers:
            return (
                f"field processes[{place}].container: {container} is no position in containers"
                f" ({containers})"
            )
    return None
