"""Reads the facts in a node's labels: pool, instance type, zone, region and capacity type. Pure.

Kubernetes defines labels for instance type, zone and region. For pools and capacity, each provider
has its own labels; the known ones are listed here. Labels from the settings take precedence.
"""

from collections.abc import Iterable, Mapping
from typing import Final

INSTANCE_TYPE_LABELS: Final = (
    # kubernetes.io/docs/reference/labels-annotations-taints: the second of each pair is deprecated.
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
)
ZONE_LABELS: Final = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
REGION_LABELS: Final = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
POOL_LABELS: Final = (
    # Karpenter on any cloud, and products based on it: EKS Auto Mode, AKS node auto-provisioning.
    # karpenter.sh/docs/concepts/scheduling; the second label is from versions before 0.32.
    "karpenter.sh/nodepool",
    "karpenter.sh/provisioner-name",
    # GKE (cloud.google.com/kubernetes-engine/docs/concepts/node-pools).
    "cloud.google.com/gke-nodepool",
    # EKS (docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html), and eksctl.
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    # AKS (learn.microsoft.com/azure/aks/use-labels); the second label is its older name.
    "kubernetes.azure.com/agentpool",
    "agentpool",
    # DigitalOcean, IBM Cloud, Alibaba Cloud, Akamai (Linode), Scaleway, and kOps.
    "doks.digitalocean.com/node-pool",
    "ibm-cloud.kubernetes.io/worker-pool-name",
    "alibabacloud.com/nodepool-id",
    "lke.linode.com/pool-id",
    "k8s.scaleway.com/pool-name",
    "kops.k8s.io/instancegroup",
)

SPOT: Final = "spot"
"""Capacity that the provider may reclaim."""
ON_DEMAND: Final = "on_demand"
"""Capacity that is paid for by use."""
RESERVED: Final = "reserved"
"""Capacity from a reservation, which is paid for whether it is used or not."""
_ANY: Final = ""
# Labels and the meanings of their values. The order matters, because a reserved GKE node is also
# labelled `standard`. Values that are not listed are used in lower case, with `_` for `-`.
CAPACITY_LABELS: Final[Mapping[str, Mapping[str, str]]] = {
    # karpenter.sh/docs/concepts/scheduling
    "karpenter.sh/capacity-type": {},
    # docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html; CAPACITY_BLOCK is a
    # capacity block for machine learning. Other values: ON_DEMAND, SPOT.
    "eks.amazonaws.com/capacityType": {"capacity_block": RESERVED},
    # cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations
    "cloud.google.com/reservation-name": {_ANY: RESERVED},
    # cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    "cloud.google.com/gke-spot": {"true": SPOT},
    "cloud.google.com/gke-preemptible": {"true": SPOT},
    "cloud.google.com/gke-provisioning": {"standard": ON_DEMAND, "preemptible": SPOT},
    # learn.microsoft.com/azure/aks/spot-node-pool; nodes outside of spot pools have no such label.
    "kubernetes.azure.com/scalesetpriority": {"regular": ON_DEMAND},
}


def first_of(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the first non-empty value of the labels in `names`; `None` if all are missing."""
    return next((value for name in names if (value := labels.get(name))), None)


def capacity_type_of(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return a node's capacity type in lower case with `_`; `None` if no label determines it.

    The labels in `names` take precedence over the known labels.
    """
    for name in (*names, *CAPACITY_LABELS):
        if value := labels.get(name):
            word = value.lower().replace("-", "_")
            meanings = CAPACITY_LABELS.get(name, {})
            # A flag that is `false` does not determine the capacity type.
            if word != "false":
                return meanings.get(_ANY) or meanings.get(word, word)
    return None
