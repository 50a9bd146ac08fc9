"""Describes the pods of a tick's books, from the records that have been read.

The books do not depend on this package.
"""
