"""One replica's container: OCI bundle, namespaces, standard streams, and its keeper."""
