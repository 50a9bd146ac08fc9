"""The agent: runs on every GPU node, reads NVML and /proc, and publishes samples and processes."""
