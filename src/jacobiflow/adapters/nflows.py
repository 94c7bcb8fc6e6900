"""nflows: masked autoregressive transforms, affine and piecewise."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from nflows.transforms import autoregressive as ar
from nflows.transforms import made
from nflows.transforms.splines.cubic import cubic_spline
from nflows.transforms.splines.linear import linear_spline
from nflows.transforms.splines.quadratic import quadratic_spline, unconstrained_quadratic_spline
from nflows.transforms.splines.rational_quadratic import (
    rational_quadratic_spline,
    unconstrained_rational_quadratic_spline,
)
from torch import Tensor

from jacobiflow.adapters.foreign import Foreign, ForeignMap, Patch, SoftplusSpline
from jacobiflow.adapters.masked import Link, Network, elementwise
from jacobiflow.core.bijectors import Bijector, ScaleAffine


class Inverse(Patch):
    """`transform.inverse(inputs, context)`."""

    method = "inverse"
    owners = (ar.AutoregressiveTransform,)

    def describe(self) -> Foreign | None:
        return describe(self.owner, ar.AutoregressiveTransform, made, _bijector(self.owner))

    def __call__(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        solver = self.ready(inputs)
        if solver is None:
            return self.original()(inputs, context)  # type: ignore[no-any-return]
        return solver.solve(inputs, context, self.tol)


def describe(owner: Any, base: type, nets: Any, bijector: Bijector | None) -> Foreign | None:
    """A transform whose inverse is that of `base`, with a MADE of module `nets` as conditioner."""
    net = owner.autoregressive_net
    if bijector is None or type(owner).inverse is not base.inverse or not isinstance(net, nets.MADE):  # type: ignore[attr-defined]
        return None
    length = net.initial_layer.in_features
    return Foreign(
        length=length,
        passes=length,
        module=owner,
        conditioner=net,
        theta=lambda x, context: net(x, context).view(len(x), length, -1),
        bijector=bijector,
        network=_network(net) if type(net).forward is made.MADE.forward else None,
    )


def _bijector(owner: Any) -> Bijector | None:
    """The elementwise map; None if a subclass has changed it, or scales its parameters."""
    kind = next((k for k in _MAPS if isinstance(owner, k)), None)
    if kind is None or hasattr(owner.autoregressive_net, "hidden_features"):
        return None
    own = ("_elementwise_forward", "_elementwise_inverse", "_elementwise", "_output_dim_multiplier")
    if any(getattr(type(owner), name, None) is not getattr(kind, name, None) for name in own):
        return None
    return _MAPS[kind](owner)  # type: ignore[no-any-return]


def _affine(owner: Any) -> Bijector:
    return ScaleAffine("softplus", owner._epsilon)


def _linear(owner: Any) -> Bijector:
    return ForeignMap(owner.num_bins, linear_spline)


def _quadratic(owner: Any) -> Bijector:
    options = {"min_bin_width": owner.min_bin_width, "min_bin_height": owner.min_bin_height}
    spline = quadratic_spline
    if owner.tails == "linear":
        spline = partial(unconstrained_quadratic_spline, tails=owner.tails, tail_bound=owner.tail_bound)
    return ForeignMap(owner._output_dim_multiplier(), _split(spline, owner.num_bins, None, **options))


def _cubic(owner: Any) -> Bijector:
    def spline(z: Tensor, theta: Tensor, inverse: bool) -> Any:
        k = owner.num_bins
        parts = theta.split((k, k, 1, 1), dim=-1)
        return cubic_spline(z, *parts, inverse=inverse)

    return ForeignMap(owner._output_dim_multiplier(), spline)


def _rational_quadratic(owner: Any) -> Bijector:
    k = owner.num_bins
    options = {
        "min_bin_width": owner.min_bin_width,
        "min_bin_height": owner.min_bin_height,
        "min_derivative": owner.min_derivative,
    }
    if owner.tails == "linear" and owner.min_bin_width == owner.min_bin_height:
        return SoftplusSpline(k, owner.tail_bound, owner.min_bin_width, owner.min_derivative)
    spline = rational_quadratic_spline
    if owner.tails == "linear":
        spline = partial(
            unconstrained_rational_quadratic_spline, tails=owner.tails, tail_bound=owner.tail_bound
        )
    return ForeignMap(owner._output_dim_multiplier(), _split(spline, k, 2 * k, **options))


def _split(spline: Any, *ends: int | None, **options: Any) -> Any:
    """A spline function that takes its parameters in one tensor, cut at `ends`."""

    def whole(z: Tensor, theta: Tensor, inverse: bool) -> Any:
        bounds = (0, *(e for e in ends if e is not None), theta.shape[-1])
        parts = [theta[..., a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
        return spline(z, *parts, inverse=inverse, **options)

    return whole


_MAPS = {
    ar.MaskedAffineAutoregressiveTransform: _affine,
    ar.MaskedPiecewiseLinearAutoregressiveTransform: _linear,
    ar.MaskedPiecewiseQuadraticAutoregressiveTransform: _quadratic,
    ar.MaskedPiecewiseCubicAutoregressiveTransform: _cubic,
    ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform: _rational_quadratic,
}


def _network(net: Any) -> Network | None:
    """The wiring of a MADE: context enters activated at the first layer, plain in residual blocks."""
    activation = elementwise(net.activation)
    if activation is None:
        return None
    given = hasattr(net, "context_layer")
    links = [
        Link(net.initial_layer, 0, False, context=(lambda c: activation(net.context_layer(c))) if given else None)
    ]
    for block in net.blocks:
        if elementwise(block.activation) is not activation:
            return None
        last = len(links)
        if isinstance(block, made.MaskedResidualBlock):
            norms = block.batch_norm_layers if block.use_batch_norm else (None, None)
            links[-1] = replace(links[-1], norm=norms[0])
            links.append(
                Link(
                    block.linear_layers[0],
                    last,
                    context=block.context_layer if given else None,
                    norm=norms[1],
                )
            )
            links.append(Link(block.linear_layers[1], last + 1, skip=last))
        else:
            links.append(Link(block.linear, last, before=block.batch_norm))
    # Residual blocks hand on what they add up; plain ones what they activate.
    links.append(Link(net.final_layer, len(links), activated=not net.use_residual_blocks))
    length = net.initial_layer.in_features
    rows = torch.arange(net.final_layer.out_features).view(length, -1)
    return Network(length, tuple(links), activation, rows)
PATCHES = (Inverse,)
