"""What a micro-batch costs on this machine: the dual-layer profiler and its cache."""
