"""The GPU source for NVIDIA, based on NVML; implements `gpuledger_agent.gpu.protocol`."""
