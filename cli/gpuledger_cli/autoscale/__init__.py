"""`gpuledger autoscale`: checks manifests that scale workloads by GPU use."""
