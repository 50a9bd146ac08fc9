"""Who the pods are on whom a tick is booked, by the records that have been read.

Books do not depend on anything here.
"""
