"""Describes the pods on which a tick is booked, from the records that have been read.

The books do not depend on this package.
"""
