"""`python -m kareus_pp.launch ...` for a Megatron-LM checkout on a machine without CUDA."""

from __future__ import annotations

import tests.integrations.megatron_stubs  # noqa: F401  before Megatron is imported
from kareus_pp.launch._run import main
from tests.integrations.megatron_cpu import megatron_on_cpu

if __name__ == "__main__":
    with megatron_on_cpu():
        main()
