"""kareus-pp: less energy, or less time, for pipeline-parallel training on NVIDIA GPUs."""

__version__ = "0.1.0"
