"""A second module tree over the same parameters, for nanobatch 1.

Layers keep objects on themselves from one line of their forward to the next, and between the two
the other nanobatch may run. A shadow has the same classes, parameters, buffers and hooks, and its
own copy of every other attribute. Attributes that name modules in other ways than as submodules
still name the original ones.
"""

from __future__ import annotations

from types import MethodType

from torch import nn

Submodules = dict[str, nn.Module | None]


class ShadowTree:
    """The shadow of a module and all modules below it.

    Args:
        module: Root of the tree.
        hidden: Attributes of the root that the shadow does not get, such as a replaced `forward`.
    """

    def __init__(self, module: nn.Module, hidden: tuple[str, ...] = ()) -> None:
        self._source = module
        self._hidden = hidden
        self._pairs: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._fresh: dict[int, tuple[nn.Module, nn.Module, Submodules, Submodules]] = {}
        self.root = self.refresh()

    def of(self, module: nn.Module) -> nn.Module:
        """The shadow of a module of the tree."""
        return self._pairs[id(module)][1]

    def refresh(self) -> nn.Module:
        """Take over the present attributes and submodules of every module; returns the root."""
        if not self._fresh or not self._copied():
            self._fresh.clear()
            self.root = self._mirror(self._source)
        for name in self._hidden:
            self.root.__dict__.pop(name, None)
        return self.root

    def _copied(self) -> bool:
        """Take over attributes as long as the tree is the one that was mirrored; it mostly is."""
        for module, shadow, known, mirrored in self._fresh.values():
            if module._modules != known or type(shadow) is not type(module):
                return False
            _take_over(module, shadow)
            shadow.__dict__["_modules"] = mirrored.copy()
        return True

    def _mirror(self, module: nn.Module) -> nn.Module:
        _, shadow = self._pairs.get(id(module), (None, None))
        if shadow is None or type(shadow) is not type(module):
            shadow = object.__new__(type(module))
            # The pair keeps the module alive, so that its id stays its own.
            self._pairs[id(module)] = (module, shadow)
        if id(module) not in self._fresh:
            known: Submodules = dict(module._modules)
            mirrored: Submodules = {}
            self._fresh[id(module)] = (module, shadow, known, mirrored)
            _take_over(module, shadow)
            for name, child in known.items():
                mirrored[name] = None if child is None else self._mirror(child)
            shadow.__dict__["_modules"] = mirrored.copy()
        return shadow


def _take_over(module: nn.Module, shadow: nn.Module) -> None:
    attributes = shadow.__dict__
    attributes.clear()
    attributes.update(module.__dict__)
    forward = attributes.get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module:
        # Patched on this instance: it must run on the shadow's own attributes.
        attributes["forward"] = MethodType(forward.__func__, shadow)
