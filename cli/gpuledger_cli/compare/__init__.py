"""`gpuledger compare`: compares the pages of dcgm-exporter and the agent on one node."""
