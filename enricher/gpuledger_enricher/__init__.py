"""Turns samples into events: podwatch publishes pods, and the join attributes GPU use to them."""
