"""Capacity planning: what a fleet has, what is wasted, and what it will need."""
