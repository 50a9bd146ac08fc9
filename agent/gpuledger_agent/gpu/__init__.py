"""Vendor-independent polling of a node's GPUs, with threads, deadlines and circuit breakers."""
