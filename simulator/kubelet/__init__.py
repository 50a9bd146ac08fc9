"""Plays a node's kubelet: what it says of devices, and the logs that it links."""

from simulator.kubelet.node import SimulatedKubelet

__all__ = ["SimulatedKubelet"]
