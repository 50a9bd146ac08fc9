"""Vendor-independent polling of a node's GPUs: threads, deadlines and breakers."""
