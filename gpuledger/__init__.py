"""Code that all components share: records, topics, bus, settings, lifecycle."""

# Same as in pyproject.toml, and repeated here: looking it up in the installed metadata would load
# zip files, compression and e-mail modules, which the agent would then carry on every node.
__version__ = "0.1.0"
