"""The settings of the remote-write sink."""

from typing import Annotated

import msgspec

from gpuledger.settings.address import require_http_url
from sinks.login import LoginSettings, refuse_half_a_login

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class RemoteWriteSettings(LoginSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where samples go, and how the sender shows who it is."""

    url: str = "http://localhost:9090/api/v1/write"
    """The receiver's remote-write endpoint."""
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    """Further headers, such as `X-Scope-OrgID`; the protocol's own cannot be overridden."""
    timeout_seconds: Seconds = 30.0
    """How long one request may take."""
    samples_per_request: Count = 2000
    """How many samples a request holds at most, one tick of one node apart."""
    max_future_seconds: Seconds = 300.0
    """Ticks further in the future are put aside: they would block their series at the receiver. So
    are those of a clock that leapt ahead less than a minute before, from 10 s on."""
    stale_after_seconds: Seconds = 60.0
    """The series of a node of which nothing has come for so long are ended."""
    max_series_bytes: Count = 134_217_728
    """How much memory the labels of the series that are alive may take: some 400 bytes a series.
    Beyond it, nodes are forgotten of which nothing has come for longest, and their series end as a
    receiver ends what it hears no more of."""
    max_poll_records: Count = 500
    """The most events that one poll brings."""

    def __post_init__(self) -> None:
        """Refuse what cannot be sent; raises ValueError naming the field."""
        try:
            require_http_url(self.url)
        except ValueError as error:
            raise ValueError(f"url {error}") from error
        refuse_half_a_login(self, url=[self.url])
        refuse_reserved(self.headers)


RESERVED_HEADERS = frozenset(
    {
        "authorization",
        "content-encoding",
        "content-length",
        "content-type",
        "host",
        "transfer-encoding",
        "user-agent",
        "x-prometheus-remote-write-version",
    }
)


def refuse_reserved(headers: dict[str, str]) -> None:
    """Raise ValueError for a header that the protocol reserves or another setting gives."""
    for name in headers:
        if name.lower() in RESERVED_HEADERS:
            raise ValueError(
                f"headers: {name} is the sender's own; take it out (credentials have settings)"
            )
