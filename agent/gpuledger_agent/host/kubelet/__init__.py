"""Reads data from the node's kubelet: the devices allocated to containers, and pod labels."""
