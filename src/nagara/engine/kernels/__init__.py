"""C kernels, compiled by the system's compiler at first use and kept by the hash of their text."""
