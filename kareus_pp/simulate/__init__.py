"""GPU models and the replay of plans on profiles."""
