"""Patch: an attribute of one object that replaces one of its methods."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.adapters import race
from jacobiflow.adapters.inverter import KERNELS, Packed, Solution, TransformInverter
from jacobiflow.adapters.recognise import verify
from jacobiflow.adapters.transform_spec import Declined, NothingToGain, State, TransformSpec
from jacobiflow.flows.weights import tensors_of

AS_FAST = ("it is as fast", "it is as fast with gradients")
FEW_PASSES = 2  # of an original inverse that leaves nothing to save


def require_gain(passes: int) -> None:
    """Raise NothingToGain where there are few passes to save."""
    if passes <= FEW_PASSES:
        raise NothingToGain(f"its own inverse takes {passes} passes")


def usable(packed: Packed | str) -> Packed:
    """The transform as it was packed, unless only the original is right."""
    if isinstance(packed, str):
        raise Declined(packed)
    return packed


@dataclass
class Tally:
    """What has run so far."""

    calls: Counter[str] = field(default_factory=Counter)  # by what ran
    rows: int = 0  # that were solved
    passes_saved: float = 0.0
    last: str = ""  # what ran last
    reason: str = ""  # why that was the original

    def count(self, ran: str, reason: str = "", rows: int = 0, saved: float = 0.0) -> None:
        self.last, self.reason = ran, reason
        self.calls[ran] += 1
        self.rows += rows
        self.passes_saved += saved


def batch_shape(z: Tensor, context: Tensor | None) -> torch.Size:
    """The leading dimensions of noise z [..., T] and context [..., C], which broadcast."""
    shapes = [t.shape[:-1] for t in (z, context) if t is not None]
    try:
        return torch.broadcast_shapes(*shapes)  # type: ignore[no-any-return, no-untyped-call]
    except RuntimeError as error:
        raise Declined("z and context of shapes that do not broadcast") from error


class Patch:
    """Replaces a method of `owner`. It is pickled and copied with its owner, and holds no weights."""

    method: ClassVar[str] = "inverse"
    whole: ClassVar[bool] = False  # whether `module` itself computes parameters, not only its children
    batched: ClassVar[bool] = False  # whether context is bound; z and it then have leading dimensions, which broadcast

    def __init__(self, owner: Any, tol: float = 0.0, tally: Tally | None = None) -> None:
        self.owner, self.tol, self.tally = owner, tol, tally or Tally()
        before = vars(owner).get(self.method)  # set on the object, as Pyro does
        self.before: Any = before.before if isinstance(before, Patch) else before
        self.shared: TransformInverter | None = None

    @classmethod
    def matches(cls, item: Any) -> bool:
        """Whether `item` has the attributes and methods of an owner."""
        raise NotImplementedError

    @property
    def module(self) -> nn.Module:
        """The module that holds all weights; a method of its own may be replaced by this patch."""
        return self.owner  # type: ignore[no-any-return]

    def describe(self, module: nn.Module) -> TransformSpec:
        """What the owner is with the weights of `module`. Raises Declined if it cannot be accelerated."""
        raise NotImplementedError

    def spec(self) -> TransformSpec:
        """The description, verified unless hooks would notice: then it is verified before it is used."""
        require_gain(self.describe(self.module).passes)
        return self.describe(self.module) if self.state().hooked else verify(self.module, self.describe)

    def original(self) -> Callable[..., Any]:
        return self.before or getattr(type(self.owner), self.method).__get__(self.owner)  # type: ignore[no-any-return]

    def install(self) -> None:
        setattr(self.owner, self.method, self)

    def remove(self) -> None:
        delattr(self.owner, self.method)
        if self.before is not None:
            setattr(self.owner, self.method, self.before)

    def inverter(self) -> TransformInverter:
        """The inverter of this owner, made on first use."""
        if self.shared is None:
            self.shared = TransformInverter(self.spec())
        return self.shared

    def now(self) -> tuple[str, str]:
        """What runs now, and why nothing faster does."""
        try:
            inverter = self.inverter()
            state = self.state()
            state.check(inverter.spec.like.device)
            packed = usable(inverter.memo.fresh(state.tensors, partial(self._pack, state)))
        except Declined as reason:
            return race.ORIGINAL, str(reason)
        if self.tally.last == race.ORIGINAL:
            return race.ORIGINAL, self.tally.reason
        ways = (self.tally.last,) if self.tally.last in packed.ways else packed.ways
        return " or ".join(ways), "" if KERNELS in ways else packed.slower()

    def state(self) -> State:
        """The state of what computes parameters."""
        return State((self.module,) if self.whole else self.module.children())

    def _pack(self, state: State) -> Packed | str:
        """The transform as it is now, or why only the original is right."""
        try:
            return self.inverter().pack(state, verify(self.module, self.describe))
        except Declined as reason:
            return str(reason)

    def solved(self, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """x with z = f(x), and log |dx/dz|, in the shape of the call. None: call the original, because ours does
        not apply or is not faster."""
        try:
            way, found = self._attempt(z, context)
        except Declined as reason:
            self.tally.count(race.ORIGINAL, str(reason))
            return None
        n, batch = len(found.x), batch_shape(z, context)
        self.tally.count(way, "", n, max(self.inverter().spec.passes - found.passes, 0))
        if found.lost:
            wider = "" if z.dtype is torch.float64 else "try float64, or "
            warnings.warn(
                f"{found.lost} of {n} samples have no finite inverse in {z.dtype}: they are not finite, "
                f"as they would be without acceleration; {wider}check the weights and the noise",
                RuntimeWarning,
                stacklevel=3,
            )
        return found.x.view(*batch, -1), found.log_det.view(batch)

    def _attempt(self, z: Tensor, context: Tensor | None, way: str | None = None) -> tuple[str, Solution]:
        """What ran, and the solution. Raises Declined where the original must run. way: the one to take."""
        inverter, given = self.inverter(), (z, context, *tensors_of(self.module))
        gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
        rows = batch_shape(z, context).numel().bit_length()
        key = (inverter.signature, rows, gradients, z.dtype, z.device, torch.get_num_threads())
        way = way or race.winner(key)
        if way == race.ORIGINAL:
            raise Declined(AS_FAST[gradients])
        state, flat = self.state(), self._rows(z, context)
        state.check(z.device)

        def use(made: Packed | str) -> tuple[str, Solution]:
            packed = usable(made)
            for frozen, now in zip(packed.spec.module.modules(), self.module.modules(), strict=False):
                frozen.training = now.training  # layers of zuko differ in their gradients
            if not packed.fits(*flat):
                raise Declined("inputs or context of another shape, dtype or device")
            chosen = way if way in packed.ways else self._race(key, packed, z, context, gradients)
            if chosen == race.ORIGINAL:
                raise Declined(AS_FAST[gradients])
            return chosen, packed.solve(*flat, self.tol, chosen)

        return inverter.memo.solve(((None, state.tensors),), partial(self._pack, state), use)

    def _rows(self, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """z [n, T], and context [n, C], or [1, C] if it is that of all rows."""
        if not self.batched:
            return z, context
        batch = batch_shape(z, context)
        if context is not None:
            context = context if context.shape[:-1].numel() == 1 else context.expand(*batch, -1)
            context = context.reshape(-1, context.shape[-1])
        return z.expand(*batch, -1).reshape(-1, z.shape[-1]), context

    def _race(self, key: Hashable, packed: Packed, z: Tensor, context: Tensor | None, gradients: bool) -> str:
        """The fastest way for these rows, gradients included."""
        weights = [p for p in self.module.parameters() if p.requires_grad]

        def timed(run: Callable[[Tensor], Any]) -> None:
            leaf = z.detach().requires_grad_(gradients)
            found = run(leaf)
            if gradients:
                total = sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
                torch.autograd.grad(total, [leaf, *weights], allow_unused=True)

        def original(z: Tensor) -> Any:
            return self.original()(z) if self.batched else self.original()(z, context)

        def ours(way: str, z: Tensor) -> tuple[Tensor, Tensor]:
            return self._attempt(z, context, way)[1][:2]

        def one_pass(z: Tensor) -> tuple[Tensor, Tensor]:
            z, rows = self._rows(z, context)
            return packed.bind(rows).sweep(z[..., None], z[..., None])

        ways = {way: partial(timed, partial(ours, way)) for way in packed.ways}
        return race.run(key, ways, partial(timed, original), partial(timed, one_pass), packed.spec.passes)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared": None}


class FactoryPatch(Patch):
    """Replaces a method that makes transforms: each of them is accelerated, with the inverter of the owner."""

    made: ClassVar[type[Patch]]  # the patch of what is made
    make: Callable[[Any], Any]  # what the method makes with the weights of a module, for any context

    def describe(self, module: nn.Module) -> TransformSpec:
        made = self.make(module)
        if not self.made.matches(made):
            raise Declined(f"it makes a {type(made).__name__}")
        return self.made(made).describe(module)

    def __call__(self, *args: Any, **options: Any) -> Any:
        transform = self.original()(*args, **options)
        patch = self.made(transform, self.tol, self.tally)
        patch.shared = self.inverter()
        patch.install()
        return transform
