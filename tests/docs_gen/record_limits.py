"""The limits of records and messages: the constants, and the effect above them."""

from typing import Final

import gpuledger.bus.limits
import gpuledger.dead_letter_queue
import gpuledger.records.base
import gpuledger.records.bounds
from tests.docs_gen.limit import Limit, Section

_BASE, _BOUNDS = gpuledger.records.base, gpuledger.records.bounds
_BUS = gpuledger.bus.limits

RECORD_LIMITS: Final = (
    Section(
        "Texts in records",
        "A record with a longer text becomes a dead-letter record `undecodable`. gpuledger's own"
        " components shorten texts that they get from a driver, a kubelet or the API server. The"
        " agent counts shortened values in `gpuledger_agent_values_cut_total` and logs"
        " `values_shortened`. podwatch counts shortened records in"
        " `gpuledger_podwatch_records_cut_total` and logs `record_shortened`.",
        (
            Limit(
                "Ids: UUIDs of GPUs and pods, ids of containers and devices",
                _BOUNDS,
                "MAX_ID_LENGTH",
            ),
            Limit("Ids of jobs", _BOUNDS, "MAX_JOB_ID_LENGTH"),
            Limit("Words: GPU models, kinds, versions", _BOUNDS, "MAX_WORD_LENGTH"),
            Limit("Sentences: messages", _BOUNDS, "MAX_SENTENCE_LENGTH"),
            Limit("Paths", _BOUNDS, "MAX_PATH_LENGTH"),
            Limit(
                "Names of namespaces and containers, values of labels", _BOUNDS, "MAX_LABEL_LENGTH"
            ),
            Limit("Names of pods and workloads", _BOUNDS, "MAX_SUBDOMAIN_LENGTH"),
            Limit("Keys of labels, annotations and resources", _BOUNDS, "MAX_QUALIFIED_LENGTH"),
            Limit("Values of annotations", _BOUNDS, "MAX_ANNOTATION_LENGTH"),
            Limit("Names of nodes", _BASE, "MAX_NODE_NAME_LENGTH"),
            Limit("Names of clusters", _BASE, "MAX_CLUSTER_NAME_LENGTH"),
        ),
    ),
    Section(
        "Lists in records",
        "A sample with a longer list becomes a dead-letter record `undecodable`, and none of its"
        " usage is recorded. gpuledger's own components omit the end of a longer list, and count"
        " this in the metrics above. If they omit a GPU or a container, they also omit its"
        " processes.",
        (
            Limit("GPUs and MIG instances of a node", _BOUNDS, "MAX_GPUS"),
            Limit("Processes on a node's GPUs", _BOUNDS, "MAX_PROCESSES"),
            Limit(
                "Containers of a node's processes, and jobs of a node's processes",
                _BOUNDS,
                "MAX_CONTAINERS",
            ),
            Limit(
                "Allocated devices of a node, with time-sliced shares", _BOUNDS, "MAX_ALLOCATIONS"
            ),
            Limit("Jobs with allocated devices", _BOUNDS, "MAX_JOB_ALLOCATIONS"),
            Limit("Process exits in one sample", _BOUNDS, "MAX_ENDED_PROCESSES"),
            Limit("Usage records of one GPU in an event", _BOUNDS, "MAX_ENTRIES"),
            Limit("Pods of an event", _BOUNDS, "MAX_EVENT_PODS"),
            Limit("Processes of an incident", _BOUNDS, "MAX_INCIDENT_PROCESSES"),
            Limit("Pods of an incident", _BOUNDS, "MAX_INCIDENT_PODS"),
            Limit("Containers of a pod", _BOUNDS, "MAX_POD_CONTAINERS"),
            Limit("Labels of a pod, and its annotations", _BOUNDS, "MAX_LABELS"),
            Limit("GPU resource names that a pod requests", _BOUNDS, "MAX_RESOURCES"),
            Limit("ResourceClaims of a container", _BOUNDS, "MAX_CLAIMS"),
            Limit("Scheduling gates of a pod", _BOUNDS, "MAX_SCHEDULING_GATES"),
            Limit("Driver calls in an inventory", _BOUNDS, "MAX_CAPABILITIES"),
            Limit("Restarting counters of a GPU", _BOUNDS, "MAX_COUNTERS"),
            Limit("NVLinks of a GPU, or its decoders", _BOUNDS, "MAX_LINKS"),
            Limit("Unresponsive nodes that a watermark names", _BOUNDS, "MAX_UNRESPONSIVE_NODES"),
        ),
    ),
    Section(
        "Descriptions in events",
        "If a description is larger, the join first omits annotations, then labels, then"
        " namespaces. `gpuledger_join_descriptions_cut_total` counts shortened descriptions.",
        (
            Limit("Description of the node, or of one namespace", _BOUNDS, "MAX_DESCRIPTION_BYTES"),
            Limit("Descriptions of all namespaces", _BOUNDS, "MAX_NAMESPACES_BYTES"),
        ),
    ),
    Section(
        "Readings",
        "A record with a value outside these limits becomes a dead-letter record `undecodable`. The"
        " agent omits such values.",
        (
            Limit("Power of a GPU, in watts", _BOUNDS, "MAX_WATTS"),
            Limit("Time that one sample covers", _BOUNDS, "MAX_INTERVAL_SECONDS"),
            Limit("Lowest temperature, in °C", _BOUNDS, "MIN_CELSIUS"),
            Limit("Temperature, in °C", _BOUNDS, "MAX_CELSIUS"),
            Limit("Clock frequency, in Hz", _BOUNDS, "MAX_HERTZ"),
            Limit("Memory of a GPU", _BOUNDS, "MAX_MEMORY_BYTES"),
            Limit("Fan speed, relative to its maximum", _BOUNDS, "MAX_FAN_RATIO"),
            Limit("Traffic, in bytes per second", _BOUNDS, "MAX_BYTES_PER_SECOND"),
            Limit("PID", _BOUNDS, "MAX_PID"),
        ),
    ),
    Section(
        "Kafka messages",
        "If another writer's batch exceeds these limits, it becomes a dead-letter record"
        " `unreadable`.",
        (
            Limit(
                "Message, uncompressed",
                _BUS,
                "MAX_MESSAGE_BYTES",
                "A dead-letter record `too_large`.",
            ),
            Limit(
                "Batch that gpuledger writes, uncompressed",
                _BUS,
                "MAX_BATCH_BYTES",
                "The next batch begins.",
            ),
            Limit("Records of a batch", _BUS, "MAX_BATCH_RECORDS"),
            Limit(
                "Batch of another writer, compressed",
                _BUS,
                "TOPIC_MESSAGE_BYTES",
                "The broker rejects it.",
            ),
            Limit("Batch of another writer, unpacked", _BUS, "MAX_UNPACKED_BYTES"),
            Limit("Headers of a record", _BUS, "MAX_RECORD_HEADERS"),
            Limit(
                "`detail` of a dead-letter record",
                gpuledger.dead_letter_queue,
                "DETAIL_CHARACTERS",
                "Truncated.",
            ),
            Limit(
                "Key that a dead-letter record always has",
                gpuledger.dead_letter_queue,
                "_SMALL_KEY_BYTES",
                "Omitted if key and value do not fit; `detail` has its beginning.",
            ),
        ),
    ),
)
