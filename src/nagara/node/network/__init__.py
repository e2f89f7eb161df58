"""An agent reached from other machines: over TCP, authenticated, with TLS if wanted."""
