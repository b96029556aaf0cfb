"""Times GRAPH and KERNELS on real calls of a partition, and picks one."""
