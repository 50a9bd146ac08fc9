"""NVIDIA's GPUs, by NVML: a source as `gpuledger_agent.gpu.protocol` has it. Nothing else knows NVML."""
