"""What is read of one node's labels: its pool, its kind of machine, where it is, how it was bought.

Pure. Kubernetes defines labels for machine, zone and region; for pools and capacity each provider
has its own, and here is their table. The settings name others, which go before it.
"""

from collections.abc import Iterable, Mapping
from typing import Final

INSTANCE_TYPE_LABELS: Final = (
    # kubernetes.io/docs/reference/labels-annotations-taints: the second one of each is deprecated.
    "node.kubernetes.io/instance-type",
    "beta.kubernetes.io/instance-type",
)
ZONE_LABELS: Final = ("topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone")
REGION_LABELS: Final = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
POOL_LABELS: Final = (
    # Karpenter, on any cloud, and what is built on it: EKS Auto Mode, AKS' node auto-provisioning.
    # karpenter.sh/docs/concepts/scheduling; the second one is of versions before 0.32.
    "karpenter.sh/nodepool",
    "karpenter.sh/provisioner-name",
    # GKE (cloud.google.com/kubernetes-engine/docs/concepts/node-pools).
    "cloud.google.com/gke-nodepool",
    # EKS (docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html), and eksctl.
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    # AKS (learn.microsoft.com/azure/aks/use-labels); the second one is its older name.
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
"""Capacity that the provider may take back."""
ON_DEMAND: Final = "on_demand"
"""Capacity that is paid for as it is used."""
RESERVED: Final = "reserved"
"""Capacity of a reservation, which is paid for whether it is used or not."""
_ANY: Final = ""
# Label, and what each of its values means; in this order, as a reserved node of GKE is `standard`
# too. A value that is not here is passed on as a word of its own.
CAPACITY_LABELS: Final[Mapping[str, Mapping[str, str]]] = {
    # karpenter.sh/docs/concepts/scheduling
    "karpenter.sh/capacity-type": {},
    # docs.aws.amazon.com/eks/latest/userguide/managed-node-groups.html, with capacity blocks for
    # machine learning: ON_DEMAND, SPOT, CAPACITY_BLOCK.
    "eks.amazonaws.com/capacityType": {"capacity_block": RESERVED},
    # cloud.google.com/kubernetes-engine/docs/how-to/consuming-reservations
    "cloud.google.com/reservation-name": {_ANY: RESERVED},
    # cloud.google.com/kubernetes-engine/docs/concepts/spot-vms
    "cloud.google.com/gke-spot": {"true": SPOT},
    "cloud.google.com/gke-preemptible": {"true": SPOT},
    "cloud.google.com/gke-provisioning": {"standard": ON_DEMAND, "preemptible": SPOT},
    # learn.microsoft.com/azure/aks/spot-node-pool; nodes that are none say nothing.
    "kubernetes.azure.com/scalesetpriority": {"regular": ON_DEMAND},
}


def first_of(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the value of the first of these labels that is there and not empty."""
    return next((value for name in names if (value := labels.get(name))), None)


def capacity_type_of(labels: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return how a node was bought, in small letters with `_`; `names` are looked at first.

    `None` where no label says it.
    """
    for name in (*names, *CAPACITY_LABELS):
        if value := labels.get(name):
            word = value.lower().replace("-", "_")
            meanings = CAPACITY_LABELS.get(name, {})
            # A flag that is not set says nothing of what else the node may be.
            if word != "false":
                return meanings.get(_ANY) or meanings.get(word, word)
    return None
