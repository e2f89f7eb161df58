"""One replica's container: OCI bundle, namespaces, standard streams, and the keeper that owns it."""
