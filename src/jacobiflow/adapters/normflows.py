"""normflows: the masked affine and rational-quadratic autoregressive flows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from normflows.flows.affine import autoregressive as affine
from normflows.flows.neural_spline import autoregressive as spline
from normflows.nets.made import MADE, MaskedFeedforwardBlock, MaskedLinear, MaskedResidualBlock
from normflows.utils import splines
from torch import Tensor

from jacobiflow.adapters import made
from jacobiflow.adapters.conditioner import runs_as
from jacobiflow.adapters.foreign import Foreign, ForeignMap, SoftplusSpline, cut
from jacobiflow.core.bijectors import Bijector, ScaleAffine


class Inverse(made.MadeInverse):
    """`flow.inverse(inputs, context)`."""

    owners = (affine.Autoregressive,)

    def describe(self) -> Foreign | None:
        net = self.owner.autoregressive_net
        bijector = made.bijector(self.owner, _MAPS)
        kinds = MaskedFeedforwardBlock, MaskedResidualBlock
        if bijector is None or not runs_as(net, MADE) or not made.known(net, MaskedLinear, *kinds):
            return None
        if not len(net.blocks):
            return None
        given = hasattr(net, "context_layer")
        activation = net.blocks[0].activation
        # Residual blocks multiply by a gate of the context; features may be made periodic first. Neither
        # is in the wiring, which then only gives the order.
        gated = given and isinstance(net.blocks[0], MaskedResidualBlock)
        if gated or type(net.preprocessing) is not torch.nn.Identity:
            activation = None
        network = made.network(
            net,
            activation,
            first_active=False,
            given=net.context_layer if given else None,
            inside=False,
        )
        indexed = isinstance(bijector, ForeignMap) and bijector.indexed
        # Plain blocks refuse context.
        contexts = (0, net.context_layer.in_features) if gated else (0,)
        return made.foreign(self.owner, bijector, network, indexed=indexed, contexts=contexts)


PATCHES = (Inverse,)


def _affine(owner: Any) -> Bijector:
    return ScaleAffine("sigmoid", 1e-3)


def _rational_quadratic(owner: Any) -> Bijector:
    k, tails, bound = owner.num_bins, owner.tails, owner.tail_bound
    limits = {name: getattr(owner, name) for name in ("min_bin_width", "min_bin_height", "min_derivative")}
    if tails is None:
        return ForeignMap(cut(splines.rational_quadratic_spline, k, 2 * k, **limits))
    alike = k > 1 and not torch.is_tensor(bound) and owner.min_bin_width == owner.min_bin_height
    if tails == "linear" and alike:
        return SoftplusSpline(k, bound, owner.min_bin_width, owner.min_derivative)

    def mixed(z: Tensor, theta: Tensor, inverse: bool) -> Any:
        """Tails and bounds may differ from feature to feature."""
        features = theta[0, :, -1].long()
        own = tails if isinstance(tails, str) else [tails[i] for i in features.tolist()]
        width = bound[features] if torch.is_tensor(bound) else bound
        function = partial(splines.unconstrained_rational_quadratic_spline, tails=own, tail_bound=width)
        return cut(function, k, 2 * k, **limits)(z, theta[..., :-1], inverse=inverse)

    return ForeignMap(mixed, indexed=True)


_MAPS = {
    affine.MaskedAffineAutoregressive: _affine,
    spline.MaskedPiecewiseRationalQuadraticAutoregressive: _rational_quadratic,
}
