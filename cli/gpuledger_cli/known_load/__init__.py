"""`gpuledger load`: puts a known load on a GPU, to check a monitor against it."""
