"""The shadow of a module tree follows the tree, and keeps to itself what a run leaves on it."""

from __future__ import annotations

import torch
from torch import nn

from kareus_pp.overlap.shadow import ShadowTree


def tree() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def test_parameters_buffers_and_hooks_are_shared_and_attributes_are_not() -> None:
    module = tree()
    shadow = ShadowTree(module)
    assert [id(p) for p in shadow.root.parameters()] == [id(p) for p in module.parameters()]
    assert {id(m) for m in shadow.root.modules()}.isdisjoint(map(id, module.modules()))
    shadow.of(module[0]).seen = 1
    assert not hasattr(module[0], "seen")
    hits = []
    module[0].register_forward_pre_hook(lambda *_: hits.append(1))
    shadow.refresh()
    shadow.root(torch.zeros(1, 2))
    assert hits == [1]
    assert not hasattr(shadow.of(module[0]), "seen")


def test_a_refresh_takes_over_attributes() -> None:
    module = tree()
    shadow = ShadowTree(module)
    module.eval()
    module[0].word = "new"
    root = shadow.refresh()
    assert not any(m.training for m in root.modules())
    assert shadow.of(module[0]).word == "new"
    del module[0].word
    shadow.refresh()
    assert not hasattr(shadow.of(module[0]), "word")


def test_a_refresh_follows_submodules_that_came_went_or_changed() -> None:
    module = tree()
    shadow = ShadowTree(module)
    before = shadow.of(module[0])
    module[1].append(nn.Tanh())
    module[0] = nn.Linear(2, 3)
    root = shadow.refresh()
    assert [type(m) for m in root.modules()] == [type(m) for m in module.modules()]
    assert shadow.of(module[0]) is not before
    assert [p.shape for p in root.parameters()] == [p.shape for p in module.parameters()]
    del module[1]
    assert len(list(shadow.refresh().modules())) == 2


def test_a_submodule_that_only_the_shadow_got_is_gone_with_the_next_refresh() -> None:
    module = tree()
    shadow = ShadowTree(module)
    shadow.root.add_module("extra", nn.ReLU())
    assert "extra" not in module._modules
    assert "extra" not in shadow.refresh()._modules


def test_a_module_in_two_places_has_one_shadow() -> None:
    shared = nn.Linear(2, 2)
    shadow = ShadowTree(nn.Sequential(shared, shared))
    first, second = shadow.root.children(), list(shadow.root._modules.values())
    assert len(list(first)) == 1
    assert second[0] is second[1] is shadow.of(shared)


def test_hidden_attributes_stay_hidden() -> None:
    module = tree()
    module.forward = lambda value: value + 1  # type: ignore[method-assign]
    shadow = ShadowTree(module, hidden=("forward",))
    for root in (shadow.root, shadow.refresh()):
        assert "forward" not in root.__dict__
