"""Messages for a remote-write client without a sink: given bytes, and a few samples."""

from dataclasses import dataclass

from gpuledger_sinks.remote_write.wire import (
    LabelSet,
    Metric,
    MetricSet,
    SampleGroup,
    TimedSamples,
    Version,
    encode_request,
    encode_time,
    encode_value,
)


@dataclass(frozen=True)
class RawMessage:
    """The same bytes in both versions."""

    body: bytes = b""
    samples: int = 0

    def encode(self, version: Version) -> bytes:  # as in Payload
        """Return the bytes."""
        return self.body


@dataclass(frozen=True)
class SampleMessage:
    """A number of series of one gauge, each with a sample."""

    samples: int = 1
    time_ms: int = 1_700_000_000_000
    name: str = "gpuledger_test_bytes"

    def encode(self, version: Version) -> bytes:
        """Return a request with the series."""
        metrics = MetricSet([Metric(name=self.name, kind="gauge", help="What a test sends.")])
        groups = [
            SampleGroup(LabelSet([("number", str(number))]), metrics)
            for number in range(self.samples)
        ]
        values = [encode_value(1.0)] * self.samples
        return encode_request(version, [TimedSamples(encode_time(self.time_ms), groups, values)])
