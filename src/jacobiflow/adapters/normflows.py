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
from jacobiflow.adapters.made import SoftplusSpline
from jacobiflow.adapters.module_state import runs_as
from jacobiflow.adapters.transform_spec import ForeignMap, TransformSpec, split_theta
from jacobiflow.core.bijectors import Bijector, ScaleAffine


class Inverse(made.MadeInverse):
    """`flow.inverse(inputs, context)`."""

    owners = (affine.Autoregressive,)

    def describe(self) -> TransformSpec | None:
        net = self.owner.autoregressive_net
        bijector = made.bijector(self.owner, _MAPS)
        kinds = MaskedFeedforwardBlock, MaskedResidualBlock
        if bijector is None or not runs_as(net, MADE) or not made.known(net, MaskedLinear, *kinds):
            return None
        if not len(net.blocks):
            return None
        given = hasattr(net, "context_layer")
        activation = net.blocks[0].activation
        # A context gate in residual blocks and periodic features cannot be packed: the network then only
        # gives the order.
        gated = given and isinstance(net.blocks[0], MaskedResidualBlock)
        if gated or type(net.preprocessing) is not torch.nn.Identity:
            activation = None
        context = net.context_layer if given else None
        network = made.network(net, activation, first_active=False, given=context, inside=False)
        # Plain blocks do not accept context.
        contexts = (0, net.context_layer.in_features) if gated else (0,)
        return made.spec(self.owner, bijector, network, contexts)


PATCHES = (Inverse,)


def _rational_quadratic(owner: Any) -> Bijector:
    k, tails, bound = owner.num_bins, owner.tails, owner.tail_bound
    limits = {name: getattr(owner, name) for name in ("min_bin_width", "min_bin_height", "min_derivative")}
    if tails is None:
        return ForeignMap(split_theta(splines.rational_quadratic_spline, k, 2 * k, **limits))
    alike = k > 1 and not torch.is_tensor(bound) and owner.min_bin_width == owner.min_bin_height
    if tails == "linear" and alike:
        return SoftplusSpline(k, bound, owner.min_bin_width, owner.min_derivative)

    def mixed(z: Tensor, theta: Tensor, inverse: bool, features: Tensor) -> Any:
        """Tails and bounds may differ between features."""
        own = tails if isinstance(tails, str) else [tails[i] for i in features.tolist()]
        width = bound[features] if torch.is_tensor(bound) else bound
        function = partial(splines.unconstrained_rational_quadratic_spline, tails=own, tail_bound=width)
        return split_theta(function, k, 2 * k, **limits)(z, theta, inverse=inverse)

    return ForeignMap(mixed, features=owner.autoregressive_net.initial_layer.in_features)


_MAPS = {
    affine.MaskedAffineAutoregressive: lambda _: ScaleAffine("sigmoid", 1e-3),
    spline.MaskedPiecewiseRationalQuadraticAutoregressive: _rational_quadratic,
}
