"""HTTP on both sides: the pages that are served, and the answers of servers that are asked.

`client` needs aiohttp, which not every deployable carries, so nothing is imported here.
"""
