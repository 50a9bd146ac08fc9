"""One scenario that plays NVML, /proc and the API server, with the ground truth beside it."""
