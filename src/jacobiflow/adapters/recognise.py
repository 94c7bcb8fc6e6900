"""What is this transform? A self-test decides which of the candidates of an adapter reproduce it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.adapters.maps import ForeignMap
from jacobiflow.adapters.masked import ForeignNetwork, pack, structure
from jacobiflow.adapters.transform_spec import Declined, State, TransformSpec, frozen
from jacobiflow.core.bijectors import Bijector
from jacobiflow.flows.masked_mlp import MaskedConditioner

ROWS = 48  # of every self-test
TWIN_FEATURES = 3  # of the small copy of a transform that the self-test inverts
THETA_SCALES = (0.3, 1.0, 3.0, 30.0)  # mild to extreme: a clamp somewhere must show
MAP_TOLERANCE, NETWORK_TOLERANCE = 1e-6, 1e-9  # relative, in float64
# Of an inverse that undoes its forward method: linear splines of nflows are off by 8e-7 and 4e-5, bisections by 1e-6.
UNDO_TOLERANCE, UNDO_LOG_TOLERANCE = 1e-5, 1e-4

FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, partial, type)
# Whether it is the inverse, value [n, w], theta [n, w, P], new value [n, w], log-determinant [n].
Case = tuple[bool, Tensor, Tensor, Tensor, Tensor]
_tested = WeakKeyDictionary[nn.Module, tuple[object, tuple[int, int | None]]]()


def verify(module: nn.Module, describe: Callable[[nn.Module], TransformSpec]) -> TransformSpec:
    """The module as it is now, with the candidates that reproduce the transform. Raises Declined if none do.

    The result holds for every module of the same classes, options, shapes and buffers. Weights do not matter: networks
    are compared with random ones. The test evaluates copies, in eval mode and without gradients.
    """
    spec = describe(frozen(module))
    about = spec.options, [(type(m), _options(m)) for m in module.modules()]
    alike = (other for other, (what, _) in list(_tested.items()) if what == about)
    known = next((m for m in alike if all(map(torch.equal, m.buffers(), module.buffers()))), None)
    if known is None:
        with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
            draw = torch.Generator().manual_seed(0)
            random, own = (describe(frozen(module, partial(_double, d)).eval()) for d in (draw, None))
            try:
                choice = _choose_map(own), _choose_network(random, draw)
            except Declined:
                raise
            except Exception as error:  # whatever another library raises
                raise Declined(f"its methods fail on a small copy: {error}") from None
    else:
        choice = _tested[known][1]
    _tested[module] = about, choice
    bijector, wiring = choice
    network = replace(spec.network, activation=None) if wiring is None else spec.networks[wiring]
    return replace(spec, maps=(spec.maps[bijector],), networks=(network,))


def _options(m: nn.Module) -> tuple[dict[str, Any], list[Any]]:
    """The numbers, words and functions among the attributes of a module, and the kinds of its tensors."""
    values = {k: id(v) if isinstance(v, FUNCTIONS) else v for k, v in vars(m).items() if k != "training"}
    kinds: list[Any] = [t is not None and t.shape for t in m._parameters.values()]
    kinds += [t is not None and (t.shape, t.dtype, t.device) for t in m._buffers.values()]
    return {k: v for k, v in values.items() if isinstance(v, bool | int | float | str | None)}, kinds


def _double(draw: torch.Generator | None, m: nn.Module, name: str, value: Tensor) -> Tensor:
    """A tensor in float64 on the CPU; with `draw`, weights and statistics of batch norm are random."""
    if not value.is_floating_point():
        return value
    if draw is None or not (name in m._parameters or name in ("running_mean", "running_var")):
        return value.detach().to("cpu", torch.float64)
    scale = 1.5 / max(value[0].numel() if value.ndim > 1 else 4, 1) ** 0.5
    new: Tensor = scale * torch.randn(value.shape, generator=draw, dtype=torch.float64)
    return new.abs() + 0.5 if name == "running_var" else new


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two results are equal up to rounding. Two non-finite numbers count as equal."""
    return a.shape == b.shape and bool((_near(a, b, tolerance) | ~(a.isfinite() | b.isfinite())).all())


def _near(a: Tensor, b: Tensor, tolerance: float) -> Tensor:
    return (a - b).abs() <= tolerance * b.abs().clamp_min(1)


def _choose_network(spec: TransformSpec, draw: torch.Generator) -> int | None:
    x = torch.randn(ROWS, spec.network.length, generator=draw, dtype=torch.float64)
    x[::2] *= 10
    context = torch.randn(ROWS, spec.context, generator=draw, dtype=torch.float64) if spec.context else None
    theta = spec.theta(x, context)
    for link in spec.network.links:  # each must be the masked linear map that it looks like
        value = 10 * torch.randn(ROWS, link.linear.in_features, generator=draw, dtype=torch.float64)
        masked = F.linear(value, link.masked(), link.linear.bias)
        if link.given is None and not _close(link.linear(value), masked, NETWORK_TOLERANCE):
            raise Declined(f"its {type(link.linear).__name__} layer is not a masked linear map")
    for i, network in enumerate(spec.networks if State([spec.module]).bare else ()):
        if _computes(network, x, context, theta):
            return i
    _check_order(spec, x, context, theta)
    return None


def _computes(network: ForeignNetwork, x: Tensor, context: Tensor | None, theta: Tensor) -> bool:
    """Whether a candidate, packed, gives theta [n, T, P] of x [n, T] and context."""
    known = structure(network)
    if network.activation is None or known is None:
        return False
    terms = {} if context is None else network.terms(context, known.units)
    packed = MaskedConditioner(pack(network, known), lambda x, context: theta, tuple, context, terms)
    rest = packed.params(x[:, known.order, None], 1, network.length - 1, packed.new_cache(len(x)))
    return _close(torch.cat((packed.first(len(x)), rest), 1), theta[:, known.order], NETWORK_TOLERANCE)


def _check_order(spec: TransformSpec, x: Tensor, context: Tensor | None, theta: Tensor) -> None:
    """Decline a network whose parameters depend on later features. Row i changes all from position t_i on."""
    known = structure(spec.network)
    if known is None:
        raise Declined("its masks are not autoregressive in any order")
    start = torch.arange(len(x))[:, None] % spec.network.length
    position = torch.argsort(known.order)
    changed = spec.theta(torch.where(position >= start, 1 - x, x), context)
    difference = torch.where((position <= start)[..., None], changed - theta, 0).abs().max()
    if not bool(difference <= 1e5 * torch.finfo(x.dtype).eps * theta.abs().max().clamp_min(1)):
        raise Declined("its parameters depend on later features, against its masks")


def _choose_map(spec: TransformSpec) -> int:
    """The first candidate that agrees with the transform's own forward and inverse methods."""
    expected = list(_expected(spec))
    for i, bijector in enumerate(spec.maps):
        if all(_agrees(bijector, spec.resolution, case) for case in expected):
            return i
    raise Declined("its forward and inverse methods differ from the elementwise maps that are known")


def _agrees(ours: Bijector, resolution: float, case: Case) -> bool:
    inverse, value, theta, new, log_det = case
    if isinstance(ours, ForeignMap) and ours.features:
        index = torch.arange(theta.shape[1]).expand(theta.shape[:2]).to(theta)
        theta = torch.cat((theta, index[..., None]), -1)
    found, log_slope = (ours.inverse if inverse else ours.forward)(value[..., None], theta)
    rough = inverse and resolution > 0  # the log-derivative of a bisection only serves as a unit
    same = _close(found[..., 0], new, MAP_TOLERANCE + 2 * resolution)
    return same and (rough or _close(log_slope.flatten(1).sum(1), log_det, MAP_TOLERANCE))


def _expected(spec: TransformSpec) -> Iterator[Case]:
    """Results of small copies of the transform with parameters of our own."""
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    params, w = spec.network.rows.shape[1], min(TWIN_FEATURES, spec.network.length)
    unit = 0.1 + 0.8 * torch.rand(ROWS, w, generator=draw, dtype=torch.float64)  # in the domain of any map
    # Parameters depend on earlier features: the inverse method must solve for all of them.
    base, direction = random(ROWS, w, params), random(w, params)

    def chained(x: Tensor) -> Tensor:
        return base + direction * (x.cumsum(1) - x).tanh()[..., None]

    forward, inverse = spec.twin(chained, w)
    z, log_det = forward(unit)
    x, back = inverse(z)
    again, slope = forward(x)
    # Where the map is flat, a rounding of z is a large error of x: there z must come back.
    undone = _near(x, unit, UNDO_TOLERANCE) | _near(again, z, UNDO_TOLERANCE)
    if not bool(undone.all()) or not _close(back, -slope, UNDO_LOG_TOLERANCE):
        raise Declined("its inverse method does not undo its forward method")
    yield False, unit, chained(unit), z, log_det
    # Parameters and values of any size: both directions, each for itself.
    sizes = torch.tensor(THETA_SCALES, dtype=torch.float64).repeat(ROWS // len(THETA_SCALES))
    theta = sizes[:, None, None] * random(ROWS, w, params)
    forward, inverse = spec.twin(lambda x: theta, w)
    for value in (4 * random(ROWS, w), unit):
        try:
            yield False, value, theta, *forward(value)
            yield True, value, theta, *inverse(value)
        except Exception:  # outside the domain, which unit values are not
            if value is unit:
                raise
