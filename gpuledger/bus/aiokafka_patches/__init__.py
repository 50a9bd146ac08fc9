"""All that reaches into aiokafka's private names; nothing else in the project does.

The minor version of aiokafka is pinned for it. Each function names the issue upstream, or the
condition, with which it can go. Before an upgrade of aiokafka go through these conditions.

- `consumers`: what a consumer does not tell, and its end while brokers are away.
- `producers`: failures that nobody waits for, and the end of a producer.
- `ending`: coroutines that end by a deadline, whatever brokers do.
- `logins`: passwords and tokens that change while a client lives.
- `packing`: zstd at the level that costs least.
- `requests`: requests in versions that aiokafka does not speak.
- `turns`: how much all consumers together unpack while the event loop waits.
- `unpacking`: a batch that cannot be unpacked is a record like any other.
"""
