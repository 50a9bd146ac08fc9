"""The agent's other sources on the node: `/proc`, the kernel log, the kubelet, job files."""
