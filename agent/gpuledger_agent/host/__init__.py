"""The agent's sources on the node other than GPUs: `/proc`, kernel log, kubelet and job files."""
