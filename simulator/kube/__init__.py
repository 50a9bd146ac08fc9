"""Plays a Kubernetes API server from a scenario, over real HTTP."""

from simulator.kube.pod_driver import write_kubeconfig
from simulator.kube.server import KubeApi, serve_kube_api

__all__ = ["KubeApi", "serve_kube_api", "write_kubeconfig"]
