"""The HTTP service `gpuledger reports`, which makes each bill in a separate process."""
