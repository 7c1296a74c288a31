"""Small training scripts that the configs run."""
