"""What the node's kubelet knows: which device it gave to which pod, and the names of containers."""
