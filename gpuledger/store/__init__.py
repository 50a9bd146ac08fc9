"""The long-term store: the schema of its Delta tables, and code that reads them.

The store sink writes with this schema and the reports read with it. Only this package and the store
sink import deltalake and Arrow; the agent and the enricher do not import it.
"""
