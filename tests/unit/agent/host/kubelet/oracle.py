"""Protobuf's own encoding of the kubelet's messages, for comparison with ours.

The messages are those of Kubernetes' `pkg/apis/podresources/v1/api.proto`, without parts that a
List response never contains.
"""

from google.protobuf import descriptor_pb2

from tests.protobuf_messages import Field, make_messages

_FIELD = descriptor_pb2.FieldDescriptorProto
_TEXT, _INT, _SIZE = _FIELD.TYPE_STRING, _FIELD.TYPE_INT64, _FIELD.TYPE_UINT64
_MESSAGES: dict[str, list[Field]] = {
    "ListPodResourcesResponse": [("pod_resources", 1, "PodResources", True)],
    "AllocatableResourcesResponse": [
        ("devices", 1, "ContainerDevices", True),
        ("cpu_ids", 2, _INT, True),
        ("memory", 3, "ContainerMemory", True),
    ],
    "PodResources": [
        ("name", 1, _TEXT, False),
        ("namespace", 2, _TEXT, False),
        ("containers", 3, "ContainerResources", True),
        ("cpu_ids", 4, _INT, True),
        ("memory", 5, "ContainerMemory", True),
    ],
    "ContainerResources": [
        ("name", 1, _TEXT, False),
        ("devices", 2, "ContainerDevices", True),
        ("cpu_ids", 3, _INT, True),
        ("memory", 4, "ContainerMemory", True),
        ("dynamic_resources", 5, "DynamicResource", True),
    ],
    "ContainerMemory": [
        ("memory_type", 1, _TEXT, False),
        ("size", 2, _SIZE, False),
        ("topology", 3, "TopologyInfo", False),
    ],
    "ContainerDevices": [
        ("resource_name", 1, _TEXT, False),
        ("device_ids", 2, _TEXT, True),
        ("topology", 3, "TopologyInfo", False),
    ],
    "TopologyInfo": [("nodes", 1, "NUMANode", True)],
    "NUMANode": [("ID", 1, _INT, False)],
    "DynamicResource": [
        ("claim_name", 2, _TEXT, False),
        ("claim_namespace", 3, _TEXT, False),
        ("claim_resources", 4, "ClaimResource", True),
    ],
    "ClaimResource": [
        ("cdi_devices", 1, "CDIDevice", True),
        ("driver_name", 2, _TEXT, False),
        ("pool_name", 3, _TEXT, False),
        ("device_name", 4, _TEXT, False),
        ("share_id", 5, _TEXT, False),
    ],
    "CDIDevice": [("name", 1, _TEXT, False)],
}


_CLASSES = make_messages(_MESSAGES, package="v1")
ListPodResourcesResponse = _CLASSES["ListPodResourcesResponse"]
AllocatableResourcesResponse = _CLASSES["AllocatableResourcesResponse"]
