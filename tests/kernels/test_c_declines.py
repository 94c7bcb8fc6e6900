"""What is not exactly the network that the C functions compute is left to torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jacobiflow as jf
from jacobiflow.core.bijectors import ExpAffine
from jacobiflow.flows.guidance import Guided
from jacobiflow.flows.transformer import CausalTransformer, Layer, TransformerConditioner
from jacobiflow.kernels import build
from jacobiflow.kernels.backend import bind
from subjects import Rotary, tarflow


class Relu(Layer):
    """Another activation."""

    def forward(self, h: Tensor, attend: Any) -> Tensor:
        n, s, w = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, s, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        h = h + self.proj(attend(q, k, v).transpose(1, 2).reshape(n, s, w))
        return h + self.down(F.relu(self.up(self.norm2(h))))


class RMSNorm(nn.LayerNorm):
    """Another norm under the old one's name."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Doubled(nn.Linear):
    """Another linear map."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Reversed(CausalTransformer):
    """Layers in another order."""

    def forward(self, h: Tensor, attend: Any) -> Tensor:
        for i, layer in reversed(list(enumerate(self.layers))):
            h = layer(h, lambda q, k, v, i=i: attend(i, q, k, v))
        return h


class Scaled(ExpAffine):
    """Another bijector."""

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return super().inverse(z, 2 * theta)


class Halved(Guided):
    """Another blend."""

    def weights(self, t: Tensor, like: Tensor) -> Tensor:
        return super().weights(t, like) / 2


def of_class(kind: type[nn.Module], path: str) -> Callable[[jf.TarFlow], None]:
    """A change of the class of one module of each block."""

    def change(flow: jf.TarFlow) -> None:
        for block in flow.blocks:
            block.get_submodule(path).__class__ = kind

    return change


def each(act: Callable[[nn.Module], Any]) -> Callable[[jf.TarFlow], None]:
    """A change of each block."""

    def change(flow: jf.TarFlow) -> None:
        for block in flow.blocks:
            act(block)

    return change


def tanh_forward(block: Any) -> None:
    up = block.net.layers[0].up
    up.forward = lambda x: F.linear(x, up.weight, up.bias).tanh()


def other_eps(block: Any) -> None:
    block.net.layers[1].norm2.eps = 0.1


def no_shift(block: Any) -> None:
    block.net.layers[1].norm2.bias = None


def no_scale_nor_shift(block: Any) -> None:
    norm = block.net.layers[0].norm1
    norm.elementwise_affine, norm.weight, norm.bias = False, None, None


def no_bias(block: Any) -> None:
    block.net.layers[0].proj.bias = None


def hook(path: str) -> Callable[[Any], Any]:
    return lambda block: block.get_submodule(path).register_forward_hook(lambda m, args, out: 1.5 * out)


def early_hook(block: Any) -> None:
    block.proj_in.register_forward_pre_hook(lambda m, args: (2 * args[0],))


def other_hidden(block: Any) -> None:
    layer = block.net.layers[1]
    up, down = nn.Linear(32, 40), nn.Linear(40, 32)
    with torch.no_grad():
        up.weight[:], up.bias[:] = layer.up.weight[:40], layer.up.bias[:40]
        down.weight[:], down.bias[:] = layer.down.weight[:, :40], layer.down.bias
    layer.up, layer.down = up.requires_grad_(False), down.requires_grad_(False)


def parametrised(block: Any) -> None:
    class Half(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w / 2

    nn.utils.parametrize.register_parametrization(block.net.layers[0].qkv, "weight", Half())


CHANGES: dict[str, Callable[[jf.TarFlow], None]] = {
    "activation": of_class(Relu, "net.layers.0"),
    "norm": of_class(RMSNorm, "net.layers.1.norm1"),
    "linear": of_class(Doubled, "net.layers.1.down"),
    "input": of_class(Doubled, "proj_in"),
    "output": of_class(Doubled, "proj_out"),
    "transformer": of_class(Reversed, "net"),
    "forward of an object": each(tanh_forward),
    "eps": each(other_eps),
    "no shift": each(no_shift),
    "no scale": each(no_scale_nor_shift),
    "no bias": each(no_bias),
    "hook on a linear": each(hook("net.layers.0.up")),
    "hook on a norm": each(hook("net.layers.0.norm2")),
    "hook on a layer": each(hook("net.layers.1")),
    "hook on the transformer": each(hook("net")),
    "hook on the output": each(hook("proj_out")),
    "pre-hook": each(early_hook),
    "hidden units": each(other_hidden),
    "parametrised": each(parametrised),
}


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def names(flow: jf.TarFlow, **options: Any) -> set[str]:
    return {block.engine.name for block in flow.bound_blocks(2, **options)}


@pytest.fixture
def flow() -> jf.TarFlow:
    made = tarflow(0.15, num_classes=3, blocks=2).requires_grad_(False)
    assert names(made) == names(made, guidance=jf.Guidance(weight=1.0)) == {"c"}
    return made


@pytest.mark.parametrize("change", CHANGES)
def test_another_part_is_torchs(change: str, flow: jf.TarFlow) -> None:
    z = flow.noise(2, seed=0)
    before = flow.decode(z, "sequential").x
    CHANGES[change](flow)
    assert names(flow) == names(flow, guidance=jf.Guidance(weight=1.0)) == {"torch"}
    found = flow.decode(z, "sequential", check=True)
    assert (found.x - before).abs().max() > 1e-3
    assert found.stats.residual.max() < 1e-4  # it decodes what it encodes
    with pytest.raises(ValueError, match="backend 'c' does not support this flow here: leave it out"):
        flow.decode(z, backend="c")


def bound(flow: jf.TarFlow, conditioner: Any, bijector: Any) -> tuple[str, Tensor]:
    """The engine's name, and what it decodes."""
    block = bind(conditioner, bijector)
    return block.engine.name, jf.decode(block, flow.noise(2, seed=0), jf.Method(width=1)).x


def test_another_bijector_conditioner_or_blend_is_torchs(flow: jf.TarFlow) -> None:
    plain, bijector = flow.bind(0, 2, None, jf.Guidance())
    guided, _ = flow.bind(0, 2, None, jf.Guidance(weight=1.0, attn_temp=2.0))
    rotary, halved = Rotary(flow.blocks[0], plain.condition), Halved(**vars(guided))
    pairs = [
        ((plain, bijector), (plain, Scaled())),
        ((plain, bijector), (rotary, bijector)),
        ((guided, bijector), (halved, bijector)),
        ((guided, bijector), (replace(guided, inner=Rotary(**vars(guided.inner))), bijector)),
        ((plain, bijector), (replace(plain, skip=1), bijector)),
    ]
    for known, other in pairs:
        (mine, x), (its, y) = bound(flow, *known), bound(flow, *other)
        assert (mine, its) == ("c", "torch")
        assert (x - y).abs().max() > 1e-3


def test_sizes_that_do_not_fit_are_torchs(flow: jf.TarFlow) -> None:
    """A position has as many parameters as the bijector takes, and a place of its own."""

    @dataclass(frozen=True)
    class Wide:
        weights: Any

        def __getattr__(self, name: str) -> Any:
            return getattr(self.weights, name)

    weights = Wide(flow.blocks[0])
    assert TransformerConditioner(weights).describe() is not None
    object.__setattr__(weights, "pos_embed", torch.zeros(99, 32))
    assert TransformerConditioner(weights).describe() is None
    shift = tarflow(0.3, blocks=1, volume_preserving=True)
    conditioner, _ = shift.bind(0, 2, None, jf.Guidance())
    assert bind(conditioner, ExpAffine()).engine.name == "torch"


@pytest.mark.parametrize("change", ["float64", "bfloat16", "one weight", "subclass"])
def test_other_numbers_are_torchs(change: str, flow: jf.TarFlow) -> None:
    class Marked(Tensor):
        pass

    if change in ("float64", "bfloat16"):
        flow = flow.to(getattr(torch, change))
    else:
        for block in flow.blocks:
            up = block.net.layers[0].up
            up.weight = nn.Parameter(
                up.weight.double() if change == "one weight" else up.weight.as_subclass(Marked),
                requires_grad=False,
            )
    assert names(flow) == {"torch"}


def test_grad_mode_does_not_matter(flow: jf.TarFlow) -> None:
    """Decoding takes no gradients through an engine, whatever the mode in which it was bound."""
    with torch.enable_grad():
        assert names(copy.deepcopy(flow).requires_grad_(True)) == {"c"}
