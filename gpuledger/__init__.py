"""What all share: records, topics, bus, settings, service lifecycle. Knows no deployable."""

# As in pyproject.toml, and written down here: to look it up among what is installed, Python loads
# zip files, archives' compressions and e-mail, which an agent would carry on each node.
__version__ = "0.1.0"
