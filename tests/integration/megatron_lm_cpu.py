"""`python -m kareus_pp.launch ...` for a Megatron-LM checkout on a machine without CUDA."""

from __future__ import annotations

from kareus_pp.integrations._import_hook import on_import
from kareus_pp.launch._run import main

import tests.integrations.megatron_stubs  # noqa: F401  before Megatron is imported
from examples.megatron_on_cpu import megatron_on_cpu
from tests.integration.megatron_lm_claims import claim_cuda, use_installed_helpers

if __name__ == "__main__":
    claim_cuda()
    on_import("megatron.core.datasets.utils", use_installed_helpers)
    with megatron_on_cpu():
        main()
