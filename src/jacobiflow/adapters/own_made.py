"""A masked network of one's own as a transform that `accelerate` accepts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise, is_masked_linear
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import Declined, Map, Theta, TransformSpec, variant
from jacobiflow.adapters.walk import captured
from jacobiflow.core.bijectors import Bijector

Params = Callable[[Tensor, Tensor | None], Tensor]


class OwnMADE(nn.Module):
    """The transform z = f(x; theta(x, context)) of a masked network that you wrote.

    params: a module or function, x [n, T] and context [n, C] or None -> theta [n, T, P]. theta[:, t] depends
        on features before t only: before in the order that the masks allow, else in the natural order.
    bijector: one of `jacobiflow.core.bijectors`, or an object with their attribute and methods: `params` (P),
        and forward(x, theta), inverse(z, theta) of [n, w, 1] and [n, w, P], which return the value and its
        log-derivative, both [n, w, 1].
    features: T. context: C, or 0.
    activation: of all hidden layers. With it hidden units are cached, if `params` is a chain of linear layers
        that are masked. Without it each sweep is a full pass.
    masks: pairs of a linear layer of `params` and its mask [out, in], from input to output; not needed if
        `params` is a module whose linear layers have their masks as an attribute `mask`.

    `inverse` takes one pass per feature until `jacobiflow.accelerate` makes it fast.
    """

    def __init__(
        self,
        params: Params,
        bijector: Bijector,
        features: int,
        *,
        context: int = 0,
        activation: Callable[[Tensor], Tensor] | None = None,
        masks: Sequence[tuple[nn.Linear, Tensor]] = (),
    ) -> None:
        super().__init__()
        self.params = params if isinstance(params, nn.Module) else _Function(params)
        self.bijector, self.features, self.context = bijector, features, context
        self.activation, names = activation, {id(m): name for name, m in self.params.named_modules()}
        for layer, mask in masks:
            if id(layer) not in names:
                raise ValueError(f"masks has a layer that params does not hold: {layer}")
            if (got := list(mask.shape)) != (want := list(layer.weight.shape)):
                raise ValueError(f"a mask has shape {got}: give it the shape {want} of its weight")
        self.masks = tuple((names[id(layer)], mask) for layer, mask in masks)  # by name: copies have others

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """z [n, T] of x [n, T], and log |dz/dx| [n]."""
        z, log_slope = self.bijector.forward(x[..., None], self.params(x, context))
        return z[..., 0], log_slope.flatten(1).sum(1)

    def inverse(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x [n, T] of z [n, T], and log |dx/dz| [n]."""
        x = log_slope = torch.zeros_like(z)[..., None]
        for _ in range(self.features):
            x, log_slope = self.bijector.inverse(z[..., None], self.params(x[..., 0], context))
        return x[..., 0], log_slope.flatten(1).sum(1)

    def sample(self, n: int, context: Tensor | None = None) -> Tensor:
        """x [n, T] for standard normal noise; context: [n, C] or [1, C]."""
        like = next(self.parameters(), torch.zeros(()))
        z = torch.randn(n, self.features, dtype=like.dtype, device=like.device)
        return self.inverse(z, None if context is None else context.expand(n, -1))[0]

    def networks(self) -> tuple[ForeignNetwork, ...]:
        """How the layers may be connected: outputs by feature or by parameter, or in an unknown way."""
        linears: list[tuple[Any, Tensor | None]] = [(self.params.get_submodule(name), m) for name, m in self.masks]
        linears = linears or [(m, None) for m in self.params.modules() if isinstance(m, nn.Linear)]
        rows = torch.arange(self.features * self.bijector.params)
        by_feature, by_parameter = rows.view(self.features, -1), rows.view(-1, self.features).T
        widths = [self.features + self.context, *(layer.out_features for layer, _ in linears)]
        chain = widths[-1] == len(rows) and all(a.in_features == w for (a, _), w in zip(linears, widths, strict=False))
        masked = self.masks or all(is_masked_linear(layer) for layer, _ in linears)
        if len(linears) < 2 or not chain or not masked:
            return (ForeignNetwork((), None, by_feature),)
        links = tuple(Link(layer, i, i > 0, given=mask) for i, (layer, mask) in enumerate(linears))
        return tuple(ForeignNetwork(links, elementwise(self.activation), r) for r in (by_feature, by_parameter))


class Inverse(Patch):
    """`transform.inverse(z, context)`."""

    @classmethod
    def matches(cls, item: Any) -> bool:
        return isinstance(item, OwnMADE)

    def describe(self, module: Any) -> TransformSpec:
        like = next(module.parameters(), torch.zeros(()))
        x, context = like.new_zeros(2, module.features), like.new_zeros(2, module.context) if module.context else None
        constant = {name: p.detach() for name, p in module.params.named_parameters()}
        with torch.enable_grad():
            if torch.func.functional_call(module.params, constant, (x, context)).requires_grad:
                raise Declined("its function has weights outside of modules: put them into a module")

        def twin(theta: Theta, width: int) -> tuple[Map, Map]:
            small = variant(module, features=width, params=lambda x, context: theta(x))
            return small.forward, lambda z: type(small).inverse(small, z)

        return TransformSpec(
            module=module,
            passes=module.features,
            context=module.context,
            theta=module.params,
            maps=(module.bijector,),
            networks=module.networks(),
            twin=twin,
            options=(id(module.bijector), id(module.activation)),
        )

    def __call__(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.solved(z, context) or self.original()(z, context)


class _Function(nn.Module):
    """A function whose weights are those of the modules in it. Copies compute with their own weights."""

    first: _Function

    def __init__(self, function: Params) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(captured(function))
        vars(self)["first"] = self  # whose modules are in the function; not a part

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        first = self.first
        if first is self:
            return self.function(x, context)
        training = [m.training for m in first.modules()]
        first.train(self.training)
        try:
            tensors = dict(self.named_parameters()) | dict(self.named_buffers())
            return torch.func.functional_call(first, tensors, (x, context))  # type: ignore[no-any-return]
        finally:
            for m, mode in zip(first.modules(), training, strict=True):
                m.training = mode

    def __deepcopy__(self, memo: Any) -> _Function:
        return variant(self, _modules=copy.deepcopy(self._modules, memo))  # type: ignore[no-any-return]
