"""GPUs behind one protocol: NVML, zeusd, a site command, emulated, dry-run."""
