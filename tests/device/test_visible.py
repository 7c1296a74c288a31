"""CUDA_VISIBLE_DEVICES in every form, checked against torch's own parser."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kareus_pp.device.errors import GpuNotFoundError, MigError
from kareus_pp.device.nvml import GpuEntry, inventory
from kareus_pp.device.visible import gpu_of_rank, parse_visible, visible_gpus
from tests.stub.nvml import StubMachine

UUIDS = ("GPU-aaaa1111-0", "GPU-aaaa2222-1", "GPU-bbbb3333-2", "GPU-cccc4444-3")
NODE = tuple(
    GpuEntry(index, uuid, "A", f"00000000:{0x10 * (index + 1):02X}:00.0")
    for index, uuid in enumerate(UUIDS)
)


def seen(text: str | None, node: tuple[GpuEntry, ...] = NODE, **more: str) -> list[int]:
    environment = dict(more)
    if text is not None:
        environment["CUDA_VISIBLE_DEVICES"] = text
    return [gpu.index for gpu in visible_gpus(node, environment)]


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("3,1", [3, 1]),
        (" 2 , 0", [2, 0]),
        ("2,-1,0", [2]),
        ("1,7,0", [1]),
        ("1,1", []),
        ("1gpu,2", [1, 2]),
        (UUIDS[2], [2]),
        (f"{UUIDS[3]},{UUIDS[0]}", [3, 0]),
        ("GPU-cccc,GPU-b", [3, 2]),
        ("gpu-cccc", []),
        (f"{UUIDS[1]},0", [1]),
    ],
)
def test_every_form(text: str | None, indices: list[int]) -> None:
    assert seen(text) == indices


@pytest.mark.parametrize("text", ["GPU-aaaa", "GPU-dddd"])
def test_a_name_that_fits_none_or_several_is_an_error(text: str) -> None:
    with pytest.raises(GpuNotFoundError, match=text):
        seen(text)


@pytest.mark.parametrize("text", ["MIG-aaaa", "MIG-GPU-aaaa1111-0/1/0"])
def test_mig_names_are_an_error_with_a_remedy(text: str) -> None:
    with pytest.raises(MigError, match="dry-run"):
        seen(text)


def test_a_gpu_with_mig_enabled_is_an_error_only_where_it_is_used() -> None:
    node = (*NODE[:3], GpuEntry(3, UUIDS[3], "A", "00000000:40:00.0", mig=True))
    assert seen("0,1", node) == [0, 1]
    with pytest.raises(MigError, match=UUIDS[3]):
        seen("3", node)


_TEXTS = st.lists(
    st.sampled_from(
        ["0", "1", "2", "9", "-1", "+1", "1x", "", " 3", "x", "GPU-a", "GPU-b", "MIG-a"]
    )
).map(",".join)


@given(_TEXTS)
@example("GPU-a,GPU-a")
def test_parsing_agrees_with_torch(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", text)
        expected = torch.cuda._parse_visible_devices()
    assert list(parse_visible(text, 64)) == expected


def test_order_is_pci_order_not_nvml_order() -> None:
    shuffled = (NODE[2], NODE[0], NODE[3], NODE[1])
    assert seen("0,3", shuffled) == [0, 3]


def test_mixed_gpus_need_an_order_or_names() -> None:
    mixed = (*NODE[:3], GpuEntry(3, UUIDS[3], "B", "00000000:40:00.0"))
    with pytest.raises(GpuNotFoundError, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        seen("1", mixed)
    assert seen("1", mixed, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [1]
    assert seen(UUIDS[1], mixed) == [1]


def test_rank_to_gpu() -> None:
    def of(text: str | None, rank: int, cuda: str | None = None) -> int:
        environment = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
        return gpu_of_rank(NODE, environment, rank, cuda).index

    assert of("2,0,1", 1) == 0
    assert of("3", 3) == 3  # a launcher that shows each rank its own GPU
    assert of("0,1", 0, UUIDS[2]) == 2  # CUDA itself decides where it was asked
    assert of("0,1", 0, UUIDS[2].removeprefix("GPU-")) == 2
    with pytest.raises(GpuNotFoundError, match="local rank 2 has no GPU: 2 are visible"):
        of("0,1", 2)
    with pytest.raises(GpuNotFoundError, match="shows no GPU"):
        of("", 0)
    with pytest.raises(MigError):
        of("0", 0, "MIG-1")
    with pytest.raises(GpuNotFoundError, match="lists no GPU"):
        gpu_of_rank((), {}, 0)


def test_the_stub_machine_end_to_end(machine: StubMachine) -> None:
    gpu = gpu_of_rank(inventory(), {"CUDA_VISIBLE_DEVICES": f"{machine.uuid(1)}"}, 0)
    assert (gpu.index, gpu.uuid) == (1, machine.uuid(1))
    machine.set(1, mig=1)
    with pytest.raises(MigError):
        gpu_of_rank(inventory(), {"CUDA_VISIBLE_DEVICES": "1"}, 0)
