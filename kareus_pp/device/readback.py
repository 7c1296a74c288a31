"""Was a requested clock held? What the read-back of clock and reasons says.

Light on purpose: the guard process imports it.
"""

from __future__ import annotations

TOLERANCE_MHZ = 30
"""Clocks come in steps of 15 MHz, and a reading may lie one step beside the truth."""
_IDLE = 0x1
_CAPPED = 0x4 | 0x8 | 0x10 | 0x20 | 0x40 | 0x80 | 0x100

HELD, CAPPED, IDLE, NOT_HELD = "held", "capped", "idle", "not held"


def verdict(requested_mhz: int, actual_mhz: int | None, reasons: int) -> str:
    """What a read-back says about a lock.

    Args:
        requested_mhz: The locked clock.
        actual_mhz: The SM clock read some 50 ms or more after the lock; None where not readable.
        reasons: NVML's clock event reasons.

    Returns:
        `HELD`; `CAPPED` where power or heat holds the clock below the lock (the setting is not
        what was measured, and no plan may use it); `IDLE` where the GPU has nothing to do, which
        says nothing; `NOT_HELD` where nothing explains the difference.
    """
    if actual_mhz is None or abs(actual_mhz - requested_mhz) <= TOLERANCE_MHZ:
        return HELD
    if actual_mhz < requested_mhz:
        if reasons & _CAPPED:
            return CAPPED
        if reasons & _IDLE:
            return IDLE
    return NOT_HELD
