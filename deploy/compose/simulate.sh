#!/bin/sh
# Start the simulated cluster now: write its start time to the agents' settings, then run its API server.
set -eu

epoch_ns="$(date +%s)000000000"
# Renamed into place, so that no agent reads a partial file.
printf 'simulator:\n  epoch_ns: %s\n' "$epoch_ns" >"$AGENT_SETTINGS.new"
mv "$AGENT_SETTINGS.new" "$AGENT_SETTINGS"
exec python -m gpuledger_simulator kube-api --scenario "$SCENARIO" --listen "$LISTEN" --epoch-ns "$epoch_ns"
