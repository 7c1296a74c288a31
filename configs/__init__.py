"""Example configurations and GPU models of the emulated device."""
