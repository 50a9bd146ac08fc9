"""An alert in one line for people, and as one object of the summary. Pure."""

from cli.demo.presence import GpuPresence
from cli.demo.receivers import Alert
from gpuledger.records.base import record


@record
class AlertLine:
    """One alert that the built-in receiver was sent."""

    name: str
    """Its rule."""
    severity: str
    """How loud it is."""
    node: str
    """The node of its GPU."""
    gpu_uuid: str
    """Its GPU."""
    text: str
    """What it says, in one line."""
    started: str
    """Since when it fires, RFC 3339."""


def describe(alert: Alert, presence: GpuPresence) -> AlertLine:
    """Return an alert's line; the GPU stands in it as people number it, where that is known."""
    labels = alert.labels
    node, uuid = labels.get("node", ""), labels.get("gpu_uuid", "")
    return AlertLine(
        name=labels.get("alertname", ""),
        severity=labels.get("severity", ""),
        node=node,
        gpu_uuid=uuid,
        text=_text(alert, node=node, gpu=presence.index_of(uuid)),
        started=alert.starts_at.isoformat(),
    )


def as_line(alert: AlertLine) -> str:
    """Return what people read of it."""
    return f"{alert.name} {alert.severity}  {alert.text}"


def _text(alert: Alert, *, node: str, gpu: int | None) -> str:
    kind, xid = alert.labels.get("kind"), alert.labels.get("xid")
    if kind is None:
        return alert.annotations.get("summary", "")
    where = node if gpu is None else f"GPU {gpu} on {node}"
    what = f"XID {xid}" if xid else kind
    pods = alert.annotations.get("pods")
    said = f"{where}: {what}, {alert.annotations.get('description', '')}"
    return f"{said} ({pods})" if pods else said
