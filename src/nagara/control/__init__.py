"""Apps, replicas, autoscaler, gateway, state, API."""
