"""A masked network of one's own as a transform that `accelerate` accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise, is_masked_linear
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import Map, Theta, TransformSpec, variant
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
    masks: [out, in] of each linear layer of `params`, if they are not the layers' `mask` attributes.

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
        masks: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.params = params if isinstance(params, nn.Module) else _Function(params)
        self.bijector, self.features, self.context = bijector, features, context
        self.activation, self.masks = activation, tuple(masks)
        shapes = [list(layer.weight.shape) for layer in self.linears()]
        if masks and [list(mask.shape) for mask in masks] != shapes:
            raise ValueError(f"masks must have the shapes of the linear layers, {shapes}")

    def linears(self) -> list[nn.Linear]:
        """The linear layers of the network, from input to output."""
        return [m for m in self.params.modules() if isinstance(m, nn.Linear)]

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
        linears, width = self.linears(), self.features + self.context
        masks = self.masks or (None,) * len(linears)
        unknown = ForeignNetwork(
            self.features, (), None, torch.zeros(self.features, self.bijector.params, dtype=torch.long)
        )
        if (
            len(linears) < 2
            or any(a.out_features != b.in_features for a, b in pairwise(linears))
            or (linears[0].in_features, linears[-1].out_features) != (width, unknown.rows.numel())
            or not (self.masks or all(map(is_masked_linear, linears)))
        ):
            return (unknown,)
        links = tuple(Link(layer, i, i > 0, given=masks[i]) for i, layer in enumerate(linears))
        rows, active = torch.arange(unknown.rows.numel()), elementwise(self.activation)
        by_feature = ForeignNetwork(self.features, links, active, rows.view(self.features, -1))
        return by_feature, ForeignNetwork(self.features, links, active, rows.view(-1, self.features).T)


class Inverse(Patch):
    """`transform.inverse(z, context)`."""

    method = "inverse"

    @classmethod
    def matches(cls, item: Any) -> bool:
        return isinstance(item, OwnMADE)

    def describe(self, module: Any) -> TransformSpec:
        def twin(theta: Theta, width: int) -> tuple[Map, Map]:
            small = variant(module, features=width)
            vars(small)["params"] = lambda x, context: theta(x)
            return small.forward, lambda z: type(small).inverse(small, z)

        return TransformSpec(
            length=module.features,
            passes=module.features,
            module=module,
            contexts=(module.context,),
            theta=module.params,
            maps=(module.bijector,),
            networks=module.networks(),
            twin=twin,
            options=(id(module.bijector), id(module.activation)),
        )

    def __call__(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        solved = self.solved(z, context, lambda z: self.original()(z, context))
        return self.original()(z, context) if solved is None else solved


class _Home:
    """A function and the modules in it. A copy of the function computes with the same modules."""

    def __init__(self, function: Params) -> None:
        self.function, self.modules = function, captured(function)

    def __deepcopy__(self, memo: Any) -> _Home:
        return self


class _Function(nn.Module):
    """A function whose weights are those of the modules in it. Copies compute with their own weights."""

    def __init__(self, function: Params) -> None:
        super().__init__()
        self.home = _Home(function)
        self.parts = nn.ModuleList(self.home.modules)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        with self._lent():
            return self.home.function(x, context)

    @contextmanager
    def _lent(self) -> Iterator[None]:
        """Give the modules in the function our tensors and mode."""
        pairs = [
            (theirs, ours)
            for theirs, ours in zip(
                chain.from_iterable(m.modules() for m in self.home.modules),
                chain.from_iterable(m.modules() for m in self.parts),
                strict=True,
            )
            if theirs is not ours
        ]
        names = ("_parameters", "_buffers", "training")
        before = [{name: vars(theirs)[name] for name in names} for theirs, _ in pairs]
        try:
            for theirs, ours in pairs:
                vars(theirs).update({name: vars(ours)[name] for name in names})
            yield
        finally:
            for (theirs, _), kept in zip(pairs, before, strict=True):
                vars(theirs).update(kept)
