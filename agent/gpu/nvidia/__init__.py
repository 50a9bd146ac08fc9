"""NVIDIA's GPUs, by NVML: a source as `agent.gpu.protocol` has it. Nothing else knows NVML."""
