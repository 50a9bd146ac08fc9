"""NVIDIA GPUs through NVML: a source as in `gpuledger_agent.gpu.protocol`."""
