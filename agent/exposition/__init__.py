"""The node's own `/metrics`: the names that dcgm-exporter's users know, and our own."""
