"""Planning: options, the integer program, bounds, frontiers, targets."""
