"""Describes the pods of a tick, from the pod records that have been read so far.

The entries of the tick do not depend on this package.
"""
