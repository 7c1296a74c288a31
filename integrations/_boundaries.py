"""Where instructions begin and end on the device that executes them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kareus_pp.runtime.boundaries import Boundaries, StreamBoundaries


def stream_boundaries(
    device: torch.device,
) -> Callable[[Callable[[BaseException], None]], Boundaries] | None:
    """How a session finds boundaries on `device`: events on the current stream of a CUDA device.

    None for a CPU, which is done with an instruction when Python is.
    """
    if device.type != "cuda":
        return None

    def new_event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    return lambda on_error: StreamBoundaries(new_event, on_error)
