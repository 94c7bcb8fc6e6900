"""Patch: an attribute of one object that replaces one of its methods."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.adapters.inverter import TransformInverter
from jacobiflow.adapters.module_state import State, ordinary
from jacobiflow.adapters.transform_spec import TransformSpec


class Patch:
    """Replaces a method of `owner`. It is pickled and copied with its owner, and holds no weights."""

    method: ClassVar[str]
    owners: ClassVar[tuple[type, ...]]

    def __init__(self, owner: Any, tol: float) -> None:
        self.owner, self.tol = owner, tol
        self.before = vars(owner).get(self.method)  # set on the object, not by its class
        self.shared: TransformInverter | None = None

    def describe(self) -> TransformSpec | None:
        """What the owner is; None if it cannot be accelerated."""
        raise NotImplementedError

    def parts(self) -> Iterable[nn.Module]:
        """The modules that compute parameters."""
        raise NotImplementedError

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
            spec = self.describe()
            assert spec is not None
            self.shared = TransformInverter(spec)
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
        inverter, state = self.inverter(), State(self.parts())
        if len(z) < inverter.min_rows or not ordinary(z) or not state.steady:
            return None

        def use(packed: bool) -> tuple[Tensor, Tensor, int] | None:
            applies = packed and inverter.fits(z, context) and len(z) >= inverter.min_rows
            return inverter.solve(z, context, self.tol) if applies else None

        found = inverter.watch.solve(
            ((None, state.tensors),), lambda: inverter.pack(state, self.describe()), use
        )
        if found is None:
            return None
        x, log_det, lost = found
        if lost:
            wider = "" if z.dtype is torch.float64 else "try float64, or "
            warnings.warn(
                f"{lost} of {len(z)} samples have no finite inverse in {z.dtype}: they are not finite, as "
                f"they would be without acceleration; {wider}check the weights and the noise",
                RuntimeWarning,
                stacklevel=3,
            )
        return x, log_det

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "shared": None}
