"""The HTTP service `gpuledger reports`; separate processes make the bills."""
