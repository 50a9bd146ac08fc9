"""The limits of components, endpoints and files: the constants, and the effect above them.

Bounds that users can set are settings, which have a page of their own.
"""

from typing import Final

import gpuledger.completeness
import gpuledger.ledger.series
import gpuledger.recent
import gpuledger.records.bounds
import gpuledger.records.counters
import gpuledger.runtime.http.client
import gpuledger.runtime.http.server
import gpuledger.runtime.http.token_endpoint
import gpuledger.runtime.http.web_config
import gpuledger.runtime.logs
import gpuledger.settings.groups
import gpuledger.settings.sources
import gpuledger.small_files
import gpuledger.texts
import gpuledger_agent.exposition.dcgm_fields
import gpuledger_agent.gpu.breaker
import gpuledger_agent.gpu.worker
import gpuledger_agent.host.job_directory
import gpuledger_agent.host.kubelet.allocations
import gpuledger_agent.host.kubelet.pod_labels
import gpuledger_agent.host.kubelet.pod_list
import gpuledger_agent.host.node_pods
import gpuledger_enricher.join.booking.late_adjustments
import gpuledger_enricher.join.observer
import gpuledger_enricher.join.pods.describe
import gpuledger_enricher.join.pods.pending
import gpuledger_enricher.join.pods.pods
import gpuledger_enricher.join.progress.passage
import gpuledger_enricher.join.progress.watermarks
import gpuledger_enricher.podwatch.decode
import gpuledger_enricher.podwatch.events
import gpuledger_enricher.podwatch.reflector
import gpuledger_reports.api.answering
import gpuledger_reports.api.filters
import gpuledger_reports.api.parameters
import gpuledger_reports.api.questions
import gpuledger_reports.api.sets
import gpuledger_reports.pricing.periods
import gpuledger_reports.pricing.policy_file
import gpuledger_sinks.alerts.active_alerts
import gpuledger_sinks.alerts.send_order
import gpuledger_sinks.alerts.slots
import gpuledger_sinks.kafka_sink
import gpuledger_sinks.protocol
import gpuledger_sinks.remote_write.partition_sender
import gpuledger_sinks.store.buffer
import gpuledger_sinks.store.minute_sums
import gpuledger_sinks.store.store_redelivery
from tests.docs_gen.limit import Limit, Section

_BOUNDS, _COUNTERS = gpuledger.records.bounds, gpuledger.records.counters
_SERVER, _CLIENT = gpuledger.runtime.http.server, gpuledger.runtime.http.client
_JOBS = gpuledger_agent.host.job_directory
_QUESTIONS = gpuledger_reports.api.questions

COMPONENT_LIMITS: Final = (
    Section(
        "HTTP endpoints",
        "A request with a body is answered with 413.",
        (
            Limit(
                "Connections that wait for their clients",
                _SERVER,
                "MAX_WAITING",
                "The connection that has waited longest is closed.",
            ),
            Limit(
                "TLS handshake, and a request", _SERVER, "HEAD_SECONDS", "The connection is closed."
            ),
            Limit(
                "Time between two requests", _SERVER, "IDLE_SECONDS", "The connection is closed."
            ),
            Limit(
                "Head of an incomplete request",
                _SERVER,
                "_MAX_HEAD_BYTES",
                "400, and the connection is closed.",
            ),
            Limit(
                "Requests that wait for a password check",
                gpuledger.runtime.http.web_config,
                "_MAX_WAITING",
                "503 with `Retry-After`.",
            ),
        ),
    ),
    Section(
        "Responses of other servers",
        "The rest of a longer response is neither read nor shown.",
        (
            Limit(
                "Response of a receiver or the API server that is only shown",
                _CLIENT,
                "MAX_BODY_BYTES",
            ),
            Limit("Time to read such a response", _CLIENT, "BODY_SECONDS"),
            Limit("Shown part of a response", gpuledger.texts, "MAX_CHARACTERS"),
            Limit("`Retry-After` of a receiver", _CLIENT, "MAX_SECONDS", "The limit applies."),
            Limit(
                "`Retry-After` of the API server",
                gpuledger_enricher.podwatch.reflector,
                "_MAX_RETRY_AFTER_SECONDS",
                "The limit applies.",
            ),
            Limit(
                "Response of a token endpoint",
                gpuledger.runtime.http.token_endpoint,
                "MAX_BODY_BYTES",
                "The request fails.",
            ),
            Limit(
                "Request to a token endpoint",
                gpuledger.runtime.http.token_endpoint,
                "DEADLINE_SECONDS",
                "The request fails.",
            ),
        ),
    ),
    Section(
        "Files and names of settings",
        "A larger file or a longer name is rejected. If a file that is read again has become too"
        " large, its previous contents stay in use.",
        (
            Limit("Settings file", gpuledger.settings.sources, "_MAX_BYTES"),
            Limit("Secret or small configuration file", gpuledger.small_files, "MAX_BYTES"),
            Limit("Certificates", gpuledger.small_files, "MAX_PEM_BYTES"),
            Limit("Web configuration", gpuledger.runtime.http.web_config, "_MAX_BYTES"),
            Limit("DCGM list of metrics", gpuledger_agent.exposition.dcgm_fields, "_MAX_BYTES"),
            Limit("Prices and policies", gpuledger_reports.pricing.policy_file, "MAX_BYTES"),
            Limit(
                "Values in a file of prices and policies",
                gpuledger_reports.pricing.policy_file,
                "MAX_VALUES",
            ),
            Limit("`kafka.topic_prefix`", gpuledger.settings.groups, "_MAX_TOPIC_PREFIX"),
            Limit("Name of a consumer group", gpuledger.settings.groups, "_MAX_GROUP_NAME"),
        ),
    ),
    Section(
        "Agent",
        "",
        (
            Limit(
                "Response of the kubelet with allocations",
                gpuledger_agent.host.kubelet.allocations,
                "MAX_ANSWER_BYTES",
                "The check `kubelet` fails.",
            ),
            Limit(
                "Response of the kubelet with pods",
                gpuledger_agent.host.kubelet.pod_list,
                "MAX_ANSWER_BYTES",
                "The checks `pod_labels` and `allocations` fail.",
            ),
            Limit(
                "Labels of a pod with `exposition.dcgm_pod_labels`",
                gpuledger_agent.host.kubelet.pod_labels,
                "MAX_DCGM_LABELS",
                "Further labels are left out.",
            ),
            Limit(
                "Names of containers on a node",
                gpuledger_agent.host.node_pods,
                "MAX_NAMES",
                "Further containers have no names on `/metrics`.",
            ),
            Limit(
                "Files in `job_mapping_dir`",
                _JOBS,
                "MAX_FILES",
                "The rest is ignored; the check `job_files` fails.",
            ),
            Limit(
                "All names in `job_mapping_dir`",
                _JOBS,
                "MAX_SCANNED",
                "The rest is ignored; the check `job_files` fails.",
            ),
            Limit(
                "Size of a file in `job_mapping_dir`",
                _JOBS,
                "MAX_FILE_BYTES",
                "The file is ignored; the check `job_files` fails.",
            ),
            Limit(
                "Jobs in a file of `job_mapping_dir`",
                _JOBS,
                "MAX_JOBS",
                "The rest is ignored; the check `job_files` fails.",
            ),
            Limit(
                "Failures in a row of a group of queries",
                gpuledger_agent.gpu.breaker,
                "MAX_FAILURES",
                "The agent sends the GPU only single probes.",
            ),
            Limit(
                "Threads of a GPU that hang in the driver",
                gpuledger_agent.gpu.worker,
                "MAX_LEAKED",
                "The GPU is not queried until a call returns.",
            ),
        ),
    ),
    Section(
        "podwatch",
        "",
        (
            Limit(
                "Page of a list",
                gpuledger_enricher.podwatch.reflector,
                "MAX_PAGE_BYTES",
                "podwatch requests a quarter of the objects.",
            ),
            Limit(
                "Line of a watch",
                gpuledger_enricher.podwatch.events,
                "MAX_LINE_BYTES",
                "The watch fails and starts again.",
            ),
            Limit(
                "Levels of an object",
                gpuledger_enricher.podwatch.decode,
                "MAX_DEPTH",
                "Deeper parts are not read.",
            ),
            Limit("Remembered unreadable objects", gpuledger_enricher.podwatch.events, "MAX_NAMED"),
        ),
    ),
    Section(
        "Join",
        "",
        (
            Limit(
                "Descriptions of all nodes",
                gpuledger_enricher.join.pods.describe,
                "MAX_DESCRIPTIONS_BYTES",
                "The descriptions of the nodes described longest ago are dropped.",
            ),
            Limit(
                "Pods that are waited for",
                gpuledger_enricher.join.pods.pending,
                "MAX_PENDING",
                "The pod that has waited longest is dropped and logged (`pods_not_found`).",
            ),
            Limit(
                "Names of a pod that is waited for",
                gpuledger_enricher.join.pods.pending,
                "_MAX_NAMES",
                "Further names are ignored.",
            ),
            Limit(
                "Past versions of a pod, node or namespace",
                gpuledger_enricher.join.pods.pods,
                "MAX_PAST_VERSIONS",
                "The oldest are dropped.",
            ),
            Limit(
                "Age of past versions",
                gpuledger_enricher.join.pods.pods,
                "PAST_VERSIONS_NS",
                "Older versions are dropped.",
            ),
            Limit(
                "Former containers of a pod",
                gpuledger_enricher.join.pods.pods,
                "MAX_FORMER_CONTAINERS",
                "The oldest are dropped.",
            ),
            Limit(
                "Nodes of a partition",
                gpuledger_enricher.join.progress.watermarks,
                "MAX_NODES",
                "The nodes that have been known for the shortest time are dropped.",
            ),
            Limit("Boots of a node in its progress record", _BOUNDS, "MAX_BOOTS"),
            Limit(
                "Delay of a node's samples",
                gpuledger_enricher.join.progress.passage,
                "UNRESPONSIVE_NS",
                "Watermarks do not wait for the node.",
            ),
            Limit(
                "Unresponsive nodes of a partition that the metrics show",
                gpuledger_enricher.join.observer,
                "MAX_NODES_SHOWN",
                "Further nodes have no series, so `GpuledgerNodeUnresponsive` does not name them.",
            ),
            Limit(
                "Time by which a sample may run ahead",
                gpuledger_enricher.join.progress.passage,
                "MAX_AHEAD_NS",
                "A dead-letter record `seq_ahead`.",
            ),
            Limit(
                "Time from a process exit to its sample",
                gpuledger_enricher.join.booking.late_adjustments,
                "MAX_BEHIND_NS",
                "The sample's time replaces the time of the exit.",
            ),
            Limit(
                "Clusters of a partition with watermarks",
                gpuledger.completeness,
                "MAX_CLUSTERS",
                "Watermarks of further clusters are neither used nor published.",
            ),
            Limit(
                "Time by which a watermark may be ahead",
                gpuledger.completeness,
                "MAX_AHEAD_NS",
                "The watermark is ignored.",
            ),
        ),
    ),
    Section(
        "Sinks",
        "Dropped data counts in `gpuledger_sink_dropped_total` and in other counters that"
        " [Metrics](metrics.md) lists.",
        (
            Limit(
                "All sinks: nodes of a partition that were seen in a day",
                gpuledger.recent,
                "MAX_A_DAY",
                "The nodes seen longest ago are forgotten.",
            ),
            Limit(
                "remote_write, rows: event",
                gpuledger_sinks.protocol,
                "LARGE_BYTES",
                "Partitions with larger events take turns.",
            ),
            Limit(
                "remote_write: devices and usage records of a sample",
                gpuledger.ledger.series,
                "MAX_GROUPS",
                "A dead-letter record `invalid`.",
            ),
            Limit(
                "remote_write: nodes of a partition",
                gpuledger_sinks.remote_write.partition_sender,
                "_MAX_NODES",
                "The counters of the nodes seen longest ago restart.",
            ),
            Limit(
                "remote_write: counter series of a node",
                _COUNTERS,
                "MAX_COUNTED_SERIES",
                "Other counter series restart.",
            ),
            Limit(
                "remote_write: GPUs of a node that have had an incident",
                _COUNTERS,
                "MAX_INCIDENT_GPUS",
                "The counters of the others restart.",
            ),
            Limit(
                "remote_write: counted incidents of a node",
                _COUNTERS,
                "MAX_KNOWN_INCIDENTS",
                "The oldest are forgotten.",
            ),
            Limit(
                "alerts: active alerts",
                gpuledger_sinks.alerts.slots,
                "MAX_HELD",
                "The oldest alert of the node with the most alerts is dropped.",
            ),
            Limit(
                "alerts: active alerts of a node",
                gpuledger_sinks.alerts.slots,
                "MAX_HELD_OF_NODE",
                "The node's oldest alert is dropped.",
            ),
            Limit(
                "alerts: label or annotation",
                gpuledger_sinks.alerts.active_alerts,
                "MAX_CHARACTERS",
                "Truncated.",
            ),
            Limit(
                "alerts: alerts of a request",
                gpuledger_sinks.alerts.send_order,
                "MAX_TOGETHER",
                "The next request contains the rest.",
            ),
            Limit(
                "store: days of one write",
                gpuledger_sinks.store.buffer,
                "MAX_DAYS",
                "Rows are written at once.",
            ),
            Limit(
                "store: rows of one event",
                gpuledger_sinks.store.minute_sums,
                "MAX_EVENT_ROWS",
                "A dead-letter record `too_large`.",
            ),
            Limit(
                "store: replayed events of a commit",
                gpuledger_sinks.store.store_redelivery,
                "MAX_REDELIVERED",
                "The next commit contains the rest.",
            ),
            Limit(
                "rows: messages of a transaction",
                gpuledger_sinks.kafka_sink,
                "MAX_TRANSACTION_BYTES",
                "The next transaction contains the rest.",
            ),
        ),
    ),
    Section(
        "Reports API and bills",
        "Above a limit, the API answers 400 and names the limit. The command exits with code 2.",
        (
            Limit("Days of a bill", gpuledger_reports.pricing.periods, "MAX_DAYS"),
            Limit("Days of a request", _QUESTIONS, "MAX_DAYS"),
            Limit("Dimensions of a request", _QUESTIONS, "MAX_DIMENSIONS"),
            Limit(
                "Namespaces in `shareNamespaces`, and labels in `shareLabels`",
                _QUESTIONS,
                "MAX_SHARED",
            ),
            Limit("Rows of an explanation or a capacity report", _QUESTIONS, "MAX_ROWS"),
            Limit("Parameters of a request", gpuledger_reports.api.parameters, "MAX_FIELDS"),
            Limit("Terms of a filter", gpuledger_reports.api.filters, "MAX_TERMS"),
            Limit("Sets of an answer", gpuledger_reports.api.sets, "MAX_SETS"),
            Limit("Allocations of an answer", gpuledger_reports.api.answering, "MAX_LINES"),
        ),
    ),
    Section(
        "Logs",
        "",
        (
            Limit(
                "Names, such as nodes, with log lines of their own",
                gpuledger.runtime.logs,
                "_MAX_KEYS",
                "Further names share one line per minute.",
            ),
        ),
    ),
)
