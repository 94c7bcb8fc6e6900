"""Patch: an attribute of one object that replaces one of its methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.adapters.inverter import TransformInverter
from jacobiflow.adapters.module_state import State, ordinary
from jacobiflow.adapters.recognise import verify
from jacobiflow.adapters.transform_spec import Declined, TransformSpec


class Patch:
    """Replaces a method of `owner`. It is pickled and copied with its owner, and holds no weights."""

    method: ClassVar[str]

    def __init__(self, owner: Any, tol: float) -> None:
        self.owner, self.tol = owner, tol
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
        if State(self.parts()).hooked:
            return self.describe(self.module)
        return verify(self.module, self.describe)

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
        made = patch(transform, self.tol)
        made.shared = self.inverter()
        made.install()
        return transform

    def solved(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """x [n, T] with z [n, T] = f(x), and log |dx/dz| [n]. None: call the original, because ours does not
        apply or is not expected to be faster."""
        try:
            inverter, state = self.inverter(), State(self.parts())
        except Declined:
            return None
        if len(z) < inverter.min_rows or not ordinary(z) or state.hooked or state.noisy:
            return None

        def use(packed: bool) -> tuple[Tensor, Tensor, int] | None:
            applies = packed and inverter.fits(z, context) and len(z) >= inverter.min_rows
            return inverter.solve(z, context, self.tol) if applies else None

        def pack() -> bool:
            try:
                return inverter.pack(state, verify(self.module, self.describe))
            except Declined:
                return False

        solution = inverter.memo.solve(((None, state.tensors),), pack, use)
        if solution is None:
            return None
        x, log_det, lost = solution
        if lost:
            wider = "" if z.dtype is torch.float64 else "try float64, or "
            warnings.warn(
                f"{lost} of {len(z)} samples have no finite inverse in {z.dtype}: they are not finite, as "
                f"they would be without acceleration; {wider}check the weights and the noise",
                RuntimeWarning,
                stacklevel=3,
            )
        return x, log_det

    def solved_batch(self, y: Tensor, context: Tensor | None) -> Tensor | None:
        """As `solved`, x only, for y [..., T] and context [..., C], whose leading dimensions broadcast."""
        shape, rows = y.shape, None
        if context is not None:
            try:
                batch = torch.broadcast_shapes(shape[:-1], context.shape[:-1])  # type: ignore[no-untyped-call]
            except RuntimeError:
                return None
            shape, rows = torch.Size((*batch, shape[-1])), context.reshape(-1, context.shape[-1])
            if len(rows) > 1:  # one row is the context of all
                rows = context.expand(*batch, -1).reshape(-1, context.shape[-1])
        solution = self.solved(y.expand(shape).reshape(-1, shape[-1]), rows)
        return None if solution is None else solution[0].view(shape)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared": None}
