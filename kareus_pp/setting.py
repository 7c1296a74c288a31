"""Settings: what is applied to one instruction."""

from __future__ import annotations

import re
from typing import NamedTuple

from kareus_pp.errors import FormatError


class Launch(NamedTuple):
    """Where the collective of one partition kind is launched, and with how many SMs.

    Attributes:
        partition: Partition kind, as in `attention` or `mlp`.
        slot: Number of the launch slot within the partition of the other nanobatch, from 0.
        sms: Number of SMs (CTAs) for the collective; 0 leaves it to the communicator.
    """

    partition: str
    slot: int
    sms: int = 0


class OverlapSetting(NamedTuple):
    """How communication overlaps compute; without launches: sequential, the framework's path."""

    launches: tuple[Launch, ...] = ()

    @property
    def is_sequential(self) -> bool:
        """True where the microbatch is not split into nanobatches."""
        return not self.launches

    def __str__(self) -> str:
        if self.is_sequential:
            return "sequential"
        return ",".join(
            f"{launch.partition}@{launch.slot}:{launch.sms}" for launch in self.launches
        )

    @classmethod
    def parse(cls, text: str) -> OverlapSetting:
        """Read the text form: `sequential`, or `attention@2:8,mlp@1:16`.

        Raises:
            FormatError: The text is not an overlap setting.
        """
        if text == "sequential":
            return SEQUENTIAL
        launches: list[Launch] = []
        for part in text.split(","):
            match = re.fullmatch(r"([A-Za-z][\w-]*)@(\d+):(\d+)", part)
            if match is None:
                raise FormatError(
                    f"{text!r} is not an overlap setting; write 'sequential' or, for each "
                    f"partition kind, kind@slot:sms, as in 'attention@2:8,mlp@1:16'"
                )
            if match[1] in (launch.partition for launch in launches):
                raise FormatError(
                    f"{text!r} launches {match[1]!r} twice; name every partition kind once"
                )
            launches.append(Launch(match[1], int(match[2]), int(match[3])))
        return cls(tuple(launches))


SEQUENTIAL = OverlapSetting()


class Setting(NamedTuple):
    """SM clock and overlap setting of one instruction.

    Text form: `1410`, `default` (clock not locked), `1410/attention@2:8`.
    """

    clock_mhz: int | None = None
    overlap: OverlapSetting = SEQUENTIAL

    def __str__(self) -> str:
        clock = "default" if self.clock_mhz is None else str(self.clock_mhz)
        return clock if self.overlap.is_sequential else f"{clock}/{self.overlap}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read the text form.

        Raises:
            FormatError: The text is not a setting.
        """
        clock, slash, overlap = text.partition("/")
        if clock != "default" and not re.fullmatch(r"[1-9]\d{0,4}", clock):
            raise FormatError(
                f"{text!r} is not a setting; write the SM clock in MHz or 'default', then, after a "
                f"slash, an overlap setting, as in '1410' or '1410/attention@2:8'"
            )
        return cls(
            None if clock == "default" else int(clock),
            OverlapSetting.parse(overlap) if slash else SEQUENTIAL,
        )


DEFAULT_SETTING = Setting()
