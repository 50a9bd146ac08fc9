"""SQL that finds names for rows that were written before their pods were known. Reads no rows.

The pod that used a GPU is looked up by its container id, then by its UID, then, for a static pod,
by its hash. Only pods of the row's node count, because a node's reports about another node's pods
are not trusted. Once the pod's record has arrived, it replaces all earlier data, including the
kubelet's names. For an allocation, the kubelet reports only names, so the allocation belongs to the
node's pod that had this name at the row's time, not to a pod that was deleted before. If the row
has the UID of a pod with another name, that UID was an assumption of the join, and the name counts.
Each join finds at most one row, so that no entry counts twice.

Each constant below is the SQL of one relation. In it, `versions` has all rows of `pods`, and
`entries` has the rows to be named.
"""

from typing import Final, NamedTuple

from gpuledger.keys import NAME_LINGER_SECONDS, NAME_SKEW_SECONDS

NEWEST_LAST: Final = "try_cast(resource_version AS HUGEINT) NULLS FIRST, kafka_offset"
"""Order of versions: by Kubernetes' resource version if it is numeric, otherwise in the order of
writing."""
# Not by time, because podwatch's clock may have been set back in between.
_HISTORY: Final = f"""list(
    {{'since': in_force_from, 'uid': pod_uid, 'namespace': namespace, 'pod': pod,
        'kind': owner_kind, 'owner': owner_name, 'labels': labels}}
    ORDER BY {NEWEST_LAST})"""
_IN_FORCE: Final = "coalesce(list_filter({0}, lambda each: each.since <= entries.time)[-1], {0}[1])"
"""The version of a history that was in force at the row's time; the first version if all versions
are later."""
_REQUESTED: Final = """
    SELECT cluster, node, pod_uid, container, arg_max(requested, kafka_offset) AS requested
    FROM versions WHERE container IS NOT NULL AND requested IS NOT NULL
    GROUP BY cluster, node, pod_uid, container"""
"""Request of each container."""
_BY_UID: Final = f"""
    SELECT cluster, node, pod_uid, any_value(namespace) AS namespace, any_value(pod) AS pod,
        {_HISTORY} AS history
    FROM versions GROUP BY cluster, node, pod_uid"""  # noqa: S608  # the tables' own names
_BY_HASH: Final = f"""
    SELECT cluster, node, config_hash, {_HISTORY} AS history
    FROM versions WHERE config_hash IS NOT NULL GROUP BY cluster, node, config_hash"""  # noqa: S608  # as above
"""Static pods, which a node identifies by the hash of their manifest."""
_PLACED: Final = """
    SELECT cluster, node, container_id, arg_max(pod_uid, kafka_offset) AS pod_uid,
        arg_max(container, kafka_offset) AS container
    FROM versions WHERE container_id IS NOT NULL GROUP BY cluster, node, container_id"""
"""The pod of each container."""
_BEARERS: Final = f"""
    SELECT cluster, node, namespace, pod,
        list({{'created': created_time, 'deleted': deleted_time, 'history': history}}
            ORDER BY created_time, pod_uid) AS pods
    FROM (
        SELECT cluster, node, namespace, pod, pod_uid,
            max(created_time) AS created_time, max(deleted_time) AS deleted_time,
            {_HISTORY} AS history
        FROM versions GROUP BY cluster, node, namespace, pod, pod_uid
    ) GROUP BY cluster, node, namespace, pod"""  # noqa: S608  # as above
"""All pods that had a name on a node, in order of creation."""
_REPORTED: Final = (
    f"SELECT *, {_IN_FORCE.format('allocatee_history')} AS allocatee FROM found AS entries"  # noqa: S608  # as above
)
_NAMED: Final = """
    SELECT entries.* EXCLUDE (user, allocatee, allocatee_history, placed_container) REPLACE (
        CASE WHEN user IS NULL THEN entries.pod_uid ELSE user.uid END AS pod_uid,
        CASE WHEN user IS NULL THEN entries.pod_state ELSE 'known' END AS pod_state,
        CASE WHEN user IS NULL THEN entries.namespace ELSE user.namespace END AS namespace,
        CASE WHEN user IS NULL THEN entries.pod ELSE user.pod END AS pod,
        coalesce(entries.container, placed_container) AS container,
        CASE WHEN user IS NULL THEN entries.owner_kind ELSE user.kind END AS owner_kind,
        CASE WHEN user IS NULL THEN entries.owner_name ELSE user.owner END AS owner_name,
        CASE WHEN user IS NULL THEN entries.labels ELSE user.labels END AS labels,
        CASE WHEN allocatee IS NULL THEN entries.allocated_pod_state ELSE 'known' END
            AS allocated_pod_state,
        CASE WHEN allocatee IS NULL THEN entries.allocated_pod_uid ELSE allocatee.uid END
            AS allocated_pod_uid,
        CASE WHEN allocatee IS NULL THEN entries.allocated_owner_kind ELSE allocatee.kind END
            AS allocated_owner_kind,
        CASE WHEN allocatee IS NULL THEN entries.allocated_owner_name ELSE allocatee.owner END
            AS allocated_owner_name,
        CASE WHEN allocatee IS NULL THEN entries.allocated_labels ELSE allocatee.labels END
            AS allocated_labels,
        coalesce(entries.requested, of_user.requested, of_holder.requested) AS requested
    )
    FROM reported AS entries
    LEFT JOIN requested AS of_user ON of_user.cluster = entries.cluster
        AND of_user.node = entries.node AND of_user.pod_uid = entries.user.uid
        AND of_user.container = coalesce(entries.container, entries.placed_container)
    LEFT JOIN requested AS of_holder ON of_holder.cluster = entries.cluster
        AND of_holder.node = entries.node AND of_holder.pod_uid = entries.allocatee.uid
        AND of_holder.container = entries.allocated_container"""
"""The rows, with the current names and descriptions of their users and allocations."""


class _Lookup(NamedTuple):
    """The rows for which pods are looked up, as SQL conditions."""

    user: str
    """Condition for rows whose user, the pod that used the GPU, is looked up."""
    allocatee: str
    """Condition for rows whose allocatee, the pod to which the GPU is allocated, is looked up."""
    until: str
    """End of a row's time, as SQL: the pod must have existed by then."""


def named_entries(rows: str, pods: str) -> str:
    """Return the SQL for rows of `entries` with the names of pods that became known later.

    `rows` and `pods` are the SQL for rows of the tables `entries` and `pods`. Only pods whose
    record was not known when the row was written are looked up.
    """
    # The state is absent if the event does not describe the pod at all.
    user = "coalesce(entries.pod_state, 'pending') IN ('pending', 'named')"
    return _named(rows, pods, _Lookup(user, allocatee="false", until="entries.time"))


def named_usage(rows: str, pods: str, *, until: str) -> str:
    """Return the SQL for usage rows with the current names and owners of their pods.

    `rows` and `pods` are the SQL for rows of a usage table and of `pods`. `until` is the SQL for
    the last time that a row covers.
    """
    user = "coalesce(entries.pod_state, 'pending') <> 'foreign'"
    return _named(rows, pods, _Lookup(user, "entries.allocated_pod_state <> 'foreign'", until))


def _named(rows: str, pods: str, lookup: _Lookup) -> str:
    return f"""(
        WITH versions AS (FROM {pods}),
        requested AS ({_REQUESTED}), by_uid AS ({_BY_UID}), by_hash AS ({_BY_HASH}),
        placed AS ({_PLACED}), bearers AS ({_BEARERS}), found AS ({_found(rows, lookup)}),
        reported AS ({_REPORTED})
        {_NAMED}
    )"""


def _found(rows: str, lookup: _Lookup) -> str:
    """Return the SQL for the rows with the pods to which they belong.

    `user` is the version of the pod that used the GPU; `allocatee_history` has all versions of the
    pod to which the GPU is allocated.
    """
    of_user = "coalesce(of_container.history, by_uid.history, by_hash.history)"
    is_other = (
        "(by_holder.namespace <> entries.allocated_namespace"
        " OR by_holder.pod <> entries.allocated_pod)"
    )
    placed, of_container, by_uid, by_holder, by_hash, bearers = (
        f"{name} ON {name}.cluster = entries.cluster AND {name}.node = entries.node"
        for name in ("placed", "of_container", "by_uid", "by_holder", "by_hash", "bearers")
    )
    return f"""
        SELECT entries.* REPLACE (
                CASE WHEN {is_other} IS NOT true THEN entries.allocated_pod_uid END
                    AS allocated_pod_uid),
            placed.container AS placed_container, {_IN_FORCE.format(of_user)} AS user,
            coalesce(CASE WHEN {is_other} IS NOT true THEN by_holder.history END,
                {_bearer_at(lookup.until)}.history) AS allocatee_history
        FROM {rows} AS entries
        LEFT JOIN {placed}
            AND placed.container_id = CASE WHEN {lookup.user} THEN entries.container_id END
        LEFT JOIN by_uid AS {of_container} AND of_container.pod_uid = placed.pod_uid
        LEFT JOIN {by_uid} AND by_uid.pod_uid = CASE WHEN {lookup.user} THEN entries.pod_uid END
        LEFT JOIN by_uid AS {by_holder}
            AND by_holder.pod_uid
            = CASE WHEN {lookup.allocatee} THEN entries.allocated_pod_uid END
        LEFT JOIN {by_hash}
            AND by_hash.config_hash = CASE WHEN {lookup.user} THEN entries.pod_uid END
        LEFT JOIN {bearers} AND bearers.namespace = entries.allocated_namespace AND bearers.pod
            = CASE WHEN entries.allocated_pod_state = 'named' THEN entries.allocated_pod END"""  # noqa: S608  # as above


def _bearer_at(until: str) -> str:
    """Return the SQL for the pod to which a name refers: the newest pod that existed at `until`.

    If no pod existed by then, it is the first pod that was created shortly after `until`, because
    the clocks of the node and the API server may differ.
    """
    there = (
        "lambda each: each.created <= {0} AND (each.deleted IS NULL"
        f" OR entries.time < each.deleted + INTERVAL {NAME_LINGER_SECONDS} SECOND)"
    )
    soon = f"{until} + INTERVAL {NAME_SKEW_SECONDS} SECOND"
    return (
        f"coalesce(list_filter(bearers.pods, {there.format(until)})[-1],"
        f" list_filter(bearers.pods, {there.format(soon)})[1])"
    )
