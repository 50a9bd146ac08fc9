"""The scaler: answers KEDA with the GPU use of workloads over the last seconds."""
