"""The long-term store: the schema of its Delta tables, and how they are read.

The store sink writes by this schema, and the reports read by it. Here alone, and in the store sink,
which writes, are deltalake and Arrow imported; neither the agent nor the enricher imports this.
"""
