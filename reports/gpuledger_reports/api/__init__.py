"""The service `gpuledger reports`: questions over HTTP, answered by processes that make bills."""
