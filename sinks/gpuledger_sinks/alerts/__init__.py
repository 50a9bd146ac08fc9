"""Alerts: incidents with their pods and owners, sent to every Alertmanager of a cluster."""
