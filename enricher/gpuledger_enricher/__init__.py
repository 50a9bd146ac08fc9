"""Turns samples into events: `podwatch` publishes the pods, `join` books devices on accounts."""
