"""The topics of an installation without a topic prefix, which most tests use."""

from typing import Final

from gpuledger.topics import Topics

TOPICS: Final = Topics()
BY_NAME: Final = TOPICS.by_name
SAMPLES: Final = TOPICS.samples
READINGS: Final = TOPICS.readings
PROCESSES: Final = TOPICS.processes
INCIDENTS: Final = TOPICS.incidents
INVENTORY: Final = TOPICS.inventory
PODS: Final = TOPICS.pods
PENDING_PODS: Final = TOPICS.pending_pods
NODES: Final = TOPICS.nodes
NAMESPACES: Final = TOPICS.namespaces
EVENTS: Final = TOPICS.events
PROGRESS: Final = TOPICS.progress
WATERMARKS: Final = TOPICS.watermarks
ATTRIBUTED_INCIDENTS: Final = TOPICS.attributed_incidents
ROWS: Final = TOPICS.rows
DEAD_LETTERS: Final = TOPICS.dead_letters
REPLAY: Final = TOPICS.replay
