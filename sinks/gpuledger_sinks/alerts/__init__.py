"""Alerts: rules over the booked events and incidents, sent to every Alertmanager of a cluster."""
