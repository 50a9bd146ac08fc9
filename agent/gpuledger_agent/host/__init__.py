"""Reads a node's data other than GPU readings: `/proc`, kernel log, kubelet and job files."""
