"""The ends of the way: kinds of sink, each a consumer group of its own.

`remote_write` sends samples to Prometheus and its kin, `alerts` sends alerts to Alertmanager,
`store` appends rows to Delta Lake tables; `rows` writes to Kafka again, as flat rows for SQL
engines. What they share (the consume loop, the retries, the metrics) lives beside them. A sink
computes nothing that the join could have computed.
"""
