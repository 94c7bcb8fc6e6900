"""A bijector for every formula of the C kernels, ours and those of other libraries."""

from __future__ import annotations

from jacobiflow.adapters.maps import (
    ClampedAffine,
    SoftclipAffine,
    SoftclipSpline,
    SoftplusSpline,
    StableAffine,
)
from jacobiflow.core.bijectors import Bijector, ExpAffine, ScaleAffine, Shift, Spline

MAPS: dict[str, Bijector] = {
    "exp": ExpAffine(),
    "shift": Shift(),
    "softplus": ScaleAffine("softplus", 1e-3),
    "sigmoid": ScaleAffine("sigmoid", 1e-3),
    "softclip": SoftclipAffine(1e-3),
    "clamped": ClampedAffine(-0.2, 0.3),
    "stable": StableAffine(2.0),
    "spline": Spline(5, 2.0),
    "softplus spline": SoftplusSpline(5, 1.5, 1e-2, 1e-2),
    "softclip spline": SoftclipSpline(5, 1.5, 0.0, 1e-3),
}
