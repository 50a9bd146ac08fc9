"""The only modules that use aiokafka's private names.

Therefore aiokafka's minor version is pinned. Each function names the upstream issue or the
condition that makes it obsolete ("Remove once …"). Check these before you upgrade aiokafka.

- `consumers`: private state of a consumer, and stopping it while brokers are unavailable.
- `producers`: failures that no task awaits, and stopping a producer.
- `connections`: connections to a broker that neither answers nor closes them.
- `coordinators`: coordinators on a broker that neither answers nor closes its connections.
- `ending`: coroutines with a deadline that holds even if brokers do not answer.
- `logins`: passwords and tokens that change while a client is open.
- `packing`: zstd compression at the cheapest level.
- `requests`: request versions that aiokafka does not support.
- `turns`: a limit on the bytes that all consumers unpack while the event loop waits.
- `unpacking`: a placeholder record for each batch that cannot be unpacked.
"""
