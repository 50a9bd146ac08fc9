"""Runs on every GPU node: NVML and /proc in; samples and process records out."""
