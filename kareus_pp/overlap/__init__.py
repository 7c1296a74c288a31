"""Partitioned overlap of tensor-parallel collectives with the other nanobatch."""
