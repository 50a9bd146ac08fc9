"""Reads the shares of GPUs that schedulers write into annotations of pods.

Each module of a product has a pure function that returns the shares stated by one pod, and a
`ShareSource` that describes the product.
"""
