"""Patch: an attribute of one object that replaces one of its methods."""

from __future__ import annotations

import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from jacobiflow.adapters.inverter import KERNELS, Packed, Solution, TransformInverter
from jacobiflow.adapters.recognise import verify
from jacobiflow.adapters.transform_spec import Declined, NothingToGain, State, TransformSpec
from jacobiflow.flows.weights import tensors_of

ORIGINAL = "original"
MARGIN = 1.2  # by which the original must be beaten
CALL_SECONDS = 5e-5  # of a call of ours beside its run, and of caches that are warmer when it is timed
REPEATS, SHORT_SECONDS = 5, 0.01  # shorter runs are repeated, because noise decides them
PATIENCE_SECONDS = 0.1  # originals that take longer are estimated from one pass
AGAIN = (100, 10_000)  # calls after which it is measured again: weights may have changed meanwhile
AS_FAST = ("it is as fast", "it is as fast with gradients")
FEW_PASSES = 2  # of an original inverse that leaves nothing to save

Work = Callable[[], object]
_kinds: defaultdict[Hashable, list[Any]] = defaultdict(lambda: [0, None])  # of calls: how many, and what has won
clock = time.perf_counter


def require_gain(passes: int) -> None:
    """Raise NothingToGain where there are few passes to save."""
    if passes <= FEW_PASSES:
        raise NothingToGain(f"its own inverse takes {passes} passes")


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


class Key(NamedTuple):
    """What decides which way is the fastest."""

    signature: int  # of the transform
    rows: int  # their number of bits
    gradients: bool
    dtype: torch.dtype
    device: torch.device
    threads: int


def batch_shape(z: Tensor, context: Tensor | None) -> torch.Size:
    """The leading dimensions of noise z [..., T] and context [..., C], which broadcast."""
    own = z.shape[:-1]
    if context is None or context.shape[:-1] == own:
        return own
    try:
        return torch.broadcast_shapes(own, context.shape[:-1])  # type: ignore[no-any-return, no-untyped-call]
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
        spec = self.describe(self.module)
        require_gain(spec.passes)
        return spec if self.state().hooked else verify(self.module, self.describe)

    def original(self) -> Callable[..., Any]:
        return self.before or getattr(type(self.owner), self.method).__get__(self.owner)  # type: ignore[no-any-return]

    def install(self) -> None:
        setattr(self.owner, self.method, self)

    def remove(self) -> None:
        delattr(self.owner, self.method)
        if self.before is not None:
            setattr(self.owner, self.method, self.before)

    def inverter(self) -> TransformInverter:
        """Made on first use."""
        self.shared = self.shared or TransformInverter(self.spec())
        return self.shared

    def now(self) -> tuple[str, str]:
        """What runs now, and why nothing faster does."""
        try:
            inverter = self.inverter()
            state = self.state()
            state.check(inverter.spec.like.device)
            packed = inverter.memo.fresh(state.tensors, partial(self._pack, state))
        except Declined as reason:
            packed = str(reason)
        if isinstance(packed, str) or self.tally.last == ORIGINAL:
            return ORIGINAL, packed if isinstance(packed, str) else self.tally.reason
        ways = (self.tally.last,) if self.tally.last in packed.ways else packed.ways
        return " or ".join(ways), "" if KERNELS in ways else packed.slower()

    def state(self) -> State:
        return State((self.module,) if self.whole else self.module.children())

    def _pack(self, state: State) -> Packed | str:
        """The transform as it is now, or why only the original is right."""
        try:
            return self.inverter().pack(state, verify(self.module, self.describe))
        except Declined as reason:
            return str(reason)

    def solved(self, z: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """x with z = f(x), and log |dx/dz|, in the shape of the call. None: call the original."""
        reason = ""
        try:
            key = self._key(z, context)
            if (won := winner(key)) == ORIGINAL:  # most calls of short originals end here: no error is raised for it
                reason = AS_FAST[key.gradients]
            else:
                way, found = self._attempt(z, context, key, won)
        except Declined as declined:
            reason = str(declined)
        if reason:
            self.tally.count(ORIGINAL, reason)
            return None
        n, batch = len(found.x), batch_shape(z, context)
        self.tally.count(way, "", n, max(self.inverter().spec.passes - found.passes, 0))
        if found.lost:
            advice = "" if z.dtype is torch.float64 else "try float64, or "
            what = f"{found.lost} of {n} samples have no finite inverse in {z.dtype}: they are not finite"
            advice += "check the weights and the noise"
            warnings.warn(f"{what}, as they would be without acceleration; {advice}", RuntimeWarning, stacklevel=3)
        return found.x.view(*batch, -1), found.log_det.view(batch)

    def _key(self, z: Tensor, context: Tensor | None) -> Key:
        given = (z,) if context is None else (z, context)
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in chain(given, tensors_of(self.module)))
        rows = batch_shape(z, context).numel().bit_length()
        return Key(self.inverter().signature, rows, gradients, z.dtype, z.device, torch.get_num_threads())

    def _attempt(self, z: Tensor, context: Tensor | None, key: Key, way: str | None) -> tuple[str, Solution]:
        """What ran, and the solution. Raises Declined where the original must run. way: the one to take."""
        inverter = self.inverter()
        state, flat = self.state(), self._rows(z, context)
        state.check(z.device)

        def use(packed: Packed | str) -> tuple[str, Solution]:
            if isinstance(packed, str):
                raise Declined(packed)
            if key.gradients:  # those of zuko's layers depend on their mode
                for frozen, now in zip(packed.spec.module.modules(), self.module.modules(), strict=False):
                    frozen.training = now.training
            if not packed.fits(*flat):
                raise Declined("inputs or context of another shape, dtype or device")
            chosen = way if way in packed.ways else self._race(key, packed, z, context)
            if chosen == ORIGINAL:
                raise Declined(AS_FAST[key.gradients])
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

    def _race(self, key: Key, packed: Packed, z: Tensor, context: Tensor | None) -> str:
        """The fastest way for these rows, gradients included."""
        gradients = key.gradients
        weights = [p for p in self.module.parameters() if p.requires_grad]

        def timed(run: Callable[[Tensor], Any]) -> None:
            leaf = z.detach().requires_grad_(gradients)
            found = run(leaf)
            if gradients:
                total = sum(t.sum() for t in (found if isinstance(found, tuple) else (found,)))
                torch.autograd.grad(total, [leaf, *weights], allow_unused=True)

        def one_pass(z: Tensor) -> tuple[Tensor, Tensor]:
            z, rows = self._rows(z, context)
            return packed.bind(rows).sweep(z[..., None], z[..., None])

        def ours(way: str) -> Work:
            return lambda: timed(lambda z: self._attempt(z, context, key, way)[1][:2])

        given = () if self.batched else (context,)
        original = partial(timed, lambda z: self.original()(z, *given))
        ways = {way: ours(way) for way in packed.ways}
        return race(key, ways, original, partial(timed, one_pass), packed.spec.passes)

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


def winner(key: Hashable) -> str | None:
    """The way that has won; None: it must be measured now."""
    kind = _kinds[key]
    kind[0] += 1
    return None if kind[0] in AGAIN else kind[1]


def race(key: Hashable, ways: Mapping[str, Work], original: Work, one_pass: Work, passes: int) -> str:
    """The fastest of our ways or the original, remembered under `key`.

    One run of each way and one pass of the original decide clear cases, unless they are short: then calls cost as
    much as passes, and only the original itself tells. In others all runs are repeated.
    """
    seconds = {name: _best(work, 1) for name, work in ways.items()}
    theirs = passes * _best(one_pass, 1)
    if theirs < SHORT_SECONDS or 2 * min(seconds.values()) > theirs:
        seconds = {name: _best(work, REPEATS) for name, work in ways.items()}
        theirs = _best(original, REPEATS) if theirs < PATIENCE_SECONDS else passes * _best(one_pass, REPEATS)
    ours = min(seconds, key=seconds.__getitem__)
    _kinds[key][1] = won = ours if MARGIN * (seconds[ours] + CALL_SECONDS) < theirs else ORIGINAL
    return won


def _best(work: Work, repeats: int) -> float:
    """Seconds of the shortest run. Long ones are not repeated."""
    times = list[float]()
    while len(times) < repeats and (not times or times[0] < SHORT_SECONDS):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)
