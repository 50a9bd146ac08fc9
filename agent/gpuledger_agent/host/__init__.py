"""What the agent reads of its node beside the GPUs: `/proc`, the kernel's log, the kubelet."""
