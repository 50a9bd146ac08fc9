"""`gpuledger inspect`: shows to whom GPUs are allocated, and who uses them."""
