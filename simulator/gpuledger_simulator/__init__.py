"""Simulates a GPU cluster from one scenario: NVML, /proc and the API server, with ground truth."""
