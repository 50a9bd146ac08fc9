"""Protobuf's own encoding of KEDA's messages, for comparison with ours.

The messages are those of KEDA's `pkg/scalers/externalscaler/externalscaler.proto`.
"""

from google.protobuf import descriptor_pb2

from tests.protobuf_messages import Field, make_messages

_FIELD = descriptor_pb2.FieldDescriptorProto
_TEXT, _INT, _BOOL, _DOUBLE = (
    _FIELD.TYPE_STRING,
    _FIELD.TYPE_INT64,
    _FIELD.TYPE_BOOL,
    _FIELD.TYPE_DOUBLE,
)
_MESSAGES: dict[str, list[Field]] = {
    # On the wire, a map is a list of messages with a key and a value.
    "Metadata": [("key", 1, _TEXT, False), ("value", 2, _TEXT, False)],
    "ScaledObjectRef": [
        ("name", 1, _TEXT, False),
        ("namespace", 2, _TEXT, False),
        ("scalerMetadata", 3, "Metadata", True),
    ],
    "IsActiveResponse": [("result", 1, _BOOL, False)],
    "GetMetricSpecResponse": [("metricSpecs", 1, "MetricSpec", True)],
    "MetricSpec": [
        ("metricName", 1, _TEXT, False),
        ("targetSize", 2, _INT, False),
        ("targetSizeFloat", 3, _DOUBLE, False),
    ],
    "GetMetricsRequest": [
        ("scaledObjectRef", 1, "ScaledObjectRef", False),
        ("metricName", 2, _TEXT, False),
    ],
    "GetMetricsResponse": [("metricValues", 1, "MetricValue", True)],
    "MetricValue": [
        ("metricName", 1, _TEXT, False),
        ("metricValue", 2, _INT, False),
        ("metricValueFloat", 3, _DOUBLE, False),
    ],
}


MESSAGES = make_messages(_MESSAGES, package="externalscaler")
