"""nflows: masked autoregressive transforms, affine and piecewise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nflows.transforms import autoregressive as ar
from nflows.transforms.made import MADE, MaskedFeedforwardBlock, MaskedLinear, MaskedResidualBlock
from nflows.transforms.splines.cubic import cubic_spline
from nflows.transforms.splines.linear import linear_spline
from nflows.transforms.splines.quadratic import quadratic_spline, unconstrained_quadratic_spline
from nflows.transforms.splines.rational_quadratic import (
    rational_quadratic_spline,
    unconstrained_rational_quadratic_spline,
)
from torch import Tensor

from jacobiflow.adapters import made
from jacobiflow.adapters.made import SoftplusSpline
from jacobiflow.adapters.module_state import runs_as
from jacobiflow.adapters.transform_spec import ForeignMap, TransformSpec, split_theta
from jacobiflow.core.bijectors import Bijector, ScaleAffine


class Inverse(made.MadeInverse):
    """`transform.inverse(inputs, context)`."""

    owners = (ar.AutoregressiveTransform,)

    def describe(self) -> TransformSpec | None:
        net = self.owner.autoregressive_net
        bijector = made.bijector(self.owner, _MAPS)
        kinds = MaskedFeedforwardBlock, MaskedResidualBlock
        if bijector is None or not runs_as(net, MADE) or not made.known(net, MaskedLinear, *kinds):
            return None
        given = hasattr(net, "context_layer")

        def first(context: Tensor) -> Tensor:
            return net.activation(net.context_layer(context))  # type: ignore[no-any-return]

        network = made.network(
            net, net.activation, first_active=True, given=first if given else None, inside=given
        )
        contexts = (0, net.context_layer.in_features) if given else (0,)
        return made.spec(self.owner, bijector, network, contexts)


PATCHES = (Inverse,)


def _quadratic(owner: Any) -> Bijector:
    spline = quadratic_spline
    if owner.tails == "linear":
        spline = partial(unconstrained_quadratic_spline, tails=owner.tails, tail_bound=owner.tail_bound)
    return ForeignMap(
        split_theta(
            spline, owner.num_bins, min_bin_width=owner.min_bin_width, min_bin_height=owner.min_bin_height
        )
    )


def _cubic(owner: Any) -> Bijector:
    k = owner.num_bins
    return ForeignMap(split_theta(cubic_spline, k, 2 * k, 2 * k + 1))


def _rational_quadratic(owner: Any) -> Bijector:
    k = owner.num_bins
    spline = rational_quadratic_spline
    if owner.tails == "linear":
        if k > 1 and owner.min_bin_width == owner.min_bin_height:
            return SoftplusSpline(k, owner.tail_bound, owner.min_bin_width, owner.min_derivative)
        spline = partial(
            unconstrained_rational_quadratic_spline, tails=owner.tails, tail_bound=owner.tail_bound
        )
    limits = {name: getattr(owner, name) for name in ("min_bin_width", "min_bin_height", "min_derivative")}
    return ForeignMap(split_theta(spline, k, 2 * k, **limits))


_MAPS: dict[type, Callable[[Any], Bijector]] = {
    ar.MaskedAffineAutoregressiveTransform: lambda owner: ScaleAffine("softplus", owner._epsilon),
    ar.MaskedPiecewiseLinearAutoregressiveTransform: lambda _: ForeignMap(split_theta(linear_spline)),
    ar.MaskedPiecewiseQuadraticAutoregressiveTransform: _quadratic,
    ar.MaskedPiecewiseCubicAutoregressiveTransform: _cubic,
    ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform: _rational_quadratic,
}
