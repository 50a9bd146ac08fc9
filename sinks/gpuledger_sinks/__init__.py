"""The sinks, which deliver events to receivers. Each kind is a consumer group of its own.

`remote_write` sends samples to Prometheus and compatible receivers, `alerts` sends alerts to
Alertmanager, `store` appends rows to Delta Lake tables, and `rows` writes flat rows for SQL engines
to a Kafka topic. `scaler` answers KEDA, and reads without a group. The modules of this package are
shared by all kinds: the consume loop, retries, metrics. If the join can make a calculation, sinks
do not make it.
"""
