"""Patch: an attribute of one object that replaces one of its methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.adapters import race
from jacobiflow.adapters.inverter import KERNELS, Solution, TransformInverter
from jacobiflow.adapters.module_state import State, only_original
from jacobiflow.adapters.recognise import verify
from jacobiflow.adapters.transform_spec import Declined, NothingToGain, TransformSpec
from jacobiflow.flows.weights import tensors_of

FEW_PASSES = 2  # of an original inverse that leaves nothing to save


@dataclass
class Tally:
    """What has run so far."""

    calls: dict[str, int] = field(default_factory=dict)  # by what ran
    rows: int = 0  # that were solved
    passes_saved: float = 0.0
    last: str = ""  # what ran last
    reason: str = ""  # why that was the original

    def count(self, ran: str, reason: str = "", rows: int = 0, saved: float = 0.0) -> None:
        """Add a call."""
        self.last, self.reason = ran, reason
        self.calls[ran] = self.calls.get(ran, 0) + 1
        self.rows += rows
        self.passes_saved += saved


@dataclass(frozen=True)
class Call:
    """A call of the inverse: noise z [n, T], context [n, C] or [1, C], and what else its time depends on."""

    z: Tensor
    context: Tensor | None
    original: Callable[[Tensor], Any]  # of z
    finish: Callable[[Tensor], Any] = id  # what the caller does with x


class Patch:
    """Replaces a method of `owner`. It is pickled and copied with its owner, and holds no weights."""

    method: ClassVar[str]

    def __init__(self, owner: Any, tol: float, tally: Tally | None = None) -> None:
        self.owner, self.tol, self.tally = owner, tol, tally or Tally()
        before = vars(owner).get(self.method)  # set on the object, not by its class
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

    def parts(self) -> Iterable[nn.Module]:
        """The modules that compute parameters."""
        return self.module.children()

    def describe(self, module: nn.Module) -> TransformSpec:
        """What the owner is with the weights of `module`. Raises Declined if it cannot be accelerated."""
        raise NotImplementedError

    def spec(self) -> TransformSpec:
        """The description, verified unless hooks would notice: then it is verified before it is used."""
        spec = self.describe(self.module)
        if spec.passes <= FEW_PASSES:
            raise NothingToGain(f"its own inverse takes {spec.passes} passes")
        return spec if State(self.parts()).hooked else verify(self.module, self.describe)

    def original(self) -> Callable[..., Any]:
        """The method that is replaced."""
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        return getattr(type(self.owner), self.method).__get__(self.owner)  # type: ignore[no-any-return]

    def install(self) -> None:
        """Replace the method."""
        setattr(self.owner, self.method, self)

    def remove(self) -> None:
        """Put the original method back."""
        delattr(self.owner, self.method)
        if self.before is not None:
            setattr(self.owner, self.method, self.before)

    def inverter(self) -> TransformInverter:
        """The inverter of this owner, made on first use."""
        if self.shared is None:
            self.shared = TransformInverter(self.spec())
        return self.shared

    def pass_on(self, transform: Any, patch: type[Patch]) -> Any:
        """Accelerate a transform that the owner has made, with the owner's inverter."""
        made = patch(transform, self.tol, self.tally)
        made.shared = self.inverter()
        made.install()
        return transform

    def now(self) -> tuple[str, str]:
        """What runs now, and why nothing faster does."""
        try:
            inverter, state = self.inverter(), State(self.parts())
            obstacle = only_original(inverter.spec.like.device) or state.obstacle
            if obstacle is None and not inverter.memo.fresh(state.tensors, partial(self._pack, state)):
                obstacle = "its masks are not autoregressive in any order"
        except Declined as reason:
            obstacle = str(reason)
        if obstacle is not None:
            return race.ORIGINAL, obstacle
        ways = (self.tally.last,) if self.tally.last in inverter.ways else inverter.ways
        if self.tally.last == race.ORIGINAL:
            return race.ORIGINAL, self.tally.reason
        return " or ".join(ways), "" if KERNELS in ways else inverter.slower()

    def _pack(self, state: State) -> bool:
        try:
            return self.inverter().pack(state, verify(self.module, self.describe))
        except Declined:
            return False

    def solved(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """x [n, T] with z [n, T] = f(x), and log |dx/dz| [n]. None: call the original, because ours does not
        apply or is not faster."""
        (way, found), z = self._attempt(call), call.z
        if not isinstance(found, Solution):
            self.tally.count(race.ORIGINAL, found)
            return None
        self.tally.count(way, "", len(z), max(self.inverter().spec.passes - found.passes, 0))
        if found.lost:
            wider = "" if z.dtype is torch.float64 else "try float64, or "
            warnings.warn(
                f"{found.lost} of {len(z)} samples have no finite inverse in {z.dtype}: they are not finite, "
                f"as they would be without acceleration; {wider}check the weights and the noise",
                RuntimeWarning,
                stacklevel=3,
            )
        return found.x, found.log_det

    def _attempt(self, call: Call, way: str | None = None) -> tuple[str, Solution | str]:
        """What ran, and the solution; or why the original must run. way: the one to take, if it is known."""
        z, context = call.z, call.context
        try:
            inverter = self.inverter()
        except Declined as reason:
            return race.ORIGINAL, str(reason)
        given = chain((z, *(() if context is None else (context,))), tensors_of(self.module))
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        key = (inverter.signature, len(z).bit_length(), gradients, z.dtype, z.device, torch.get_num_threads())
        way, as_fast = way or race.winner(key), "it is as fast" + " with gradients" * gradients
        if way == race.ORIGINAL:
            return way, as_fast
        state = State(self.parts())
        if obstacle := only_original(z.device) or state.obstacle:
            return race.ORIGINAL, obstacle

        def use(packed: bool) -> tuple[str, Solution | str]:
            if not packed:
                return race.ORIGINAL, "its masks are not autoregressive in any order"
            if not inverter.fits(z, context):
                return race.ORIGINAL, "inputs or context of another shape, dtype or device"
            chosen = way if way in inverter.ways else self._race(key, call, gradients)
            if chosen == race.ORIGINAL:
                return chosen, as_fast
            return chosen, inverter.solve(z, context, self.tol, chosen)

        return inverter.memo.solve(((None, state.tensors),), partial(self._pack, state), use)

    def _race(self, key: Hashable, call: Call, gradients: bool) -> str:
        """The fastest way for these rows, gradients included."""
        weights = [p for p in self.module.parameters() if p.requires_grad]

        def timed(run: Callable[[Tensor], Any]) -> race.Work:
            def once() -> None:
                leaf = call.z.detach().requires_grad_(gradients)
                found = run(leaf)
                if gradients:
                    total = sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
                    torch.autograd.grad(total, [leaf, *weights], allow_unused=True)

            return once

        def ours(way: str, z: Tensor) -> tuple[Tensor, Tensor]:
            _, found = self._attempt(replace(call, z=z), way)
            assert isinstance(found, Solution)
            call.finish(found.x)
            return found.x, found.log_det

        def one_pass(z: Tensor) -> tuple[Tensor, Tensor]:
            block, x = self.inverter().bind(call.context), z.unsqueeze(-1)
            return block.sweep(x, x)

        ways = {way: timed(partial(ours, way)) for way in self.inverter().ways}
        return race.run(key, ways, timed(call.original), timed(one_pass), self.inverter().spec.passes)

    def solved_batch(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """As `solved` for z [..., T] and context [..., C], whose leading dimensions broadcast."""
        y, context, rows = call.z, call.context, None
        shape = y.shape
        if context is not None:
            try:
                batch = torch.broadcast_shapes(shape[:-1], context.shape[:-1])  # type: ignore[no-untyped-call]
            except RuntimeError:
                return None
            shape, rows = torch.Size((*batch, shape[-1])), context.reshape(-1, context.shape[-1])
            if len(rows) > 1:  # one row is the context of all
                rows = context.expand(*batch, -1).reshape(-1, context.shape[-1])
        flat = y.expand(shape).reshape(-1, shape[-1])
        solution = self.solved(
            Call(flat, rows, lambda z: call.original(z.view(shape)), lambda x: call.finish(x.view(shape)))
        )
        return None if solution is None else (solution[0].view(shape), solution[1].view(shape[:-1]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared": None}
