"""Shared memory between a trainer and its guard: one word to set a clock, a ring of samples.

The trainer's request is one aligned 8-byte store: a sequence number in the high half, MHz in the
low half (0: default clocks; all ones: end). The newest request wins, so nothing queues. The guard
answers with the word that it applied. Nothing here takes a lock or makes a system call.

Light on purpose: the guard process imports it.
"""

from __future__ import annotations

import math
import mmap
import os
import struct

STOP = 0xFFFFFFFFFFFFFFFF

# Indices of the 8-byte words. The trainer writes REQUEST and PERIOD_US, the guard all others.
REQUEST, APPLIED, SWITCHES, CALLS, STATE, HEARTBEAT_NS, GUARD_PID, PERIOD_US = range(8)
RING_HEAD, ERROR_BYTES, LAST_CALL_NS = range(8, 11)

STARTING, READY, STOOD_DOWN, CLOSED = range(4)

RING_SLOTS = 8192
_WORDS = 64
_TEXT_AT, _TEXT_BYTES = 1024, 1024
_RING_AT = 4096
_SLOT = struct.Struct("=ddddQii16x")
"""at_s, energy_j, power_w, temperature_c (NaN: unread), reasons, clock_mhz, requested_mhz (-1)."""
SIZE = _RING_AT + RING_SLOTS * _SLOT.size

RawSample = tuple[float, float | None, float | None, float | None, int, int | None, int]


def word(sequence: int, mhz: int) -> int:
    """The request word; the sequence number wraps after 2^31 requests."""
    return ((sequence & 0x7FFFFFFF) << 32) | mhz


def mhz_of(request: int) -> int:
    """The clock in a request word."""
    return request & 0xFFFFFFFF


class Channel:
    """The shared memory, created by the trainer and opened by the guard from the descriptor.

    Attributes:
        words: The 8-byte words; see the indices of this module.
        handle: Descriptor of the memory.
    """

    def __init__(self, handle: int | None = None) -> None:
        if handle is None:
            handle = os.memfd_create("kareus-pp", os.MFD_CLOEXEC)
            os.ftruncate(handle, SIZE)
        self.handle = handle
        self._memory = mmap.mmap(handle, SIZE)
        self.words = memoryview(self._memory)[: _WORDS * 8].cast("Q")

    def write_error(self, text: str) -> None:
        """Write the error; the first one stays."""
        if self.words[ERROR_BYTES] == 0 and text:
            data = text.encode()[:_TEXT_BYTES]
            self._memory[_TEXT_AT : _TEXT_AT + len(data)] = data
            self.words[ERROR_BYTES] = len(data)

    def read_error(self) -> str:
        """The error, or empty text."""
        size = self.words[ERROR_BYTES]
        return self._memory[_TEXT_AT : _TEXT_AT + size].decode(errors="replace") if size else ""

    def push(self, sample: RawSample) -> None:
        """Write a sample into the ring (the guard only)."""
        at_s, energy_j, power_w, temperature_c, reasons, clock_mhz, requested_mhz = sample
        head = self.words[RING_HEAD]
        _SLOT.pack_into(
            self._memory,
            _RING_AT + head % RING_SLOTS * _SLOT.size,
            at_s,
            _nan(energy_j),
            _nan(power_w),
            _nan(temperature_c),
            reasons,
            -1 if clock_mhz is None else clock_mhz,
            requested_mhz,
        )
        self.words[RING_HEAD] = head + 1

    def read(self, tail: int) -> tuple[list[RawSample], int]:
        """The samples from number `tail` on, and the number of the next one.

        A reader that comes too late loses the oldest samples, never gets a torn one.
        """
        head = self.words[RING_HEAD]
        first = max(tail, head - RING_SLOTS)
        raw = [
            _SLOT.unpack_from(self._memory, _RING_AT + number % RING_SLOTS * _SLOT.size)
            for number in range(first, head)
        ]
        # What the guard overwrote meanwhile, and the slot it may be writing, is dropped.
        lost = max(0, self.words[RING_HEAD] + 1 - RING_SLOTS - first)
        return [_sample(values) for values in raw[lost:]], head

    def close(self) -> None:
        """Unmap; safe to call twice."""
        self.words.release()
        self._memory.close()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _sample(values: tuple[float, float, float, float, int, int, int]) -> RawSample:
    at_s, energy_j, power_w, temperature_c, reasons, clock_mhz, requested_mhz = values
    return (
        at_s,
        _known(energy_j),
        _known(power_w),
        _known(temperature_c),
        reasons,
        None if clock_mhz < 0 else clock_mhz,
        requested_mhz,
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
