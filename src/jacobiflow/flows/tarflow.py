"""TarFlow: images as sequences of patches, each block a causal transformer.

Zhai et al., 2024, Normalizing Flows are Capable Generative Models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector, ExpAffine, Shift
from jacobiflow.core.native import usable
from jacobiflow.core.types import Block, Cache, Init, Unit
from jacobiflow.flows.arguments import instance, number, whole
from jacobiflow.flows.compiled import CompiledBlock
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance, GuidedBlock
from jacobiflow.flows.native_transformer import NativeCache, NativeNet
from jacobiflow.flows.transformer import EXPANSION, CausalTransformer, KVCache
from jacobiflow.flows.weights import Watched, check_size, linear_shapes, tensors_of

CACHE_BYTES = 16 << 20  # keys and values of the rows that a CPU solves at a time: they stay in its last cache


@dataclass(frozen=True, kw_only=True)
class TarFlowConfig:
    """The shape of a TarFlow and the noise that it was trained with.

    Sequence length is (image_size / patch_size)^2, numbers a position image_channels * patch_size^2.
    num_classes 0 is an unconditional model. noise_std is the Gaussian noise of training, on images
    in [-1, 1], that `denoise` removes; 0 means that training dequantised instead.
    """

    image_size: int
    image_channels: int = 3
    patch_size: int = 4
    width: int = 256
    blocks: int = 8
    layers_per_block: int = 8
    head_dim: int = 64
    num_classes: int = 0
    volume_preserving: bool = False
    noise_std: float = 0.0

    def __post_init__(self) -> None:
        for name in (
            "image_size",
            "image_channels",
            "patch_size",
            "width",
            "blocks",
            "layers_per_block",
            "head_dim",
        ):
            object.__setattr__(self, name, whole(f"TarFlowConfig.{name}", getattr(self, name), 1))
        object.__setattr__(self, "num_classes", whole("TarFlowConfig.num_classes", self.num_classes))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"TarFlowConfig.patch_size {self.patch_size} does not divide image_size {self.image_size}"
            )
        if self.width % self.head_dim:
            raise ValueError(f"TarFlowConfig.width {self.width} is no multiple of head_dim {self.head_dim}")
        if number("TarFlowConfig.noise_std", self.noise_std) < 0:
            raise ValueError(f"TarFlowConfig.noise_std must be finite and not negative, not {self.noise_std}")

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def dim(self) -> int:
        """Numbers a position."""
        return self.image_channels * self.patch_size**2

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all stored tensors, without making any."""
        w, d, out = self.width, self.dim, self.dim * (1 if self.volume_preserving else 2)
        yield "var", (self.length, d)
        for k in range(self.blocks):
            yield f"blocks.{k}.pos_embed", (self.length, w)
            if self.num_classes:
                yield f"blocks.{k}.class_embed", (self.num_classes, w)
            yield from linear_shapes(f"blocks.{k}.proj_in", d, w)
            for i in range(self.layers_per_block):
                layer = f"blocks.{k}.net.layers.{i}"
                for name, rows, cols in (
                    ("qkv", 3 * w, w),
                    ("proj", w, w),
                    ("up", EXPANSION * w, w),
                    ("down", w, EXPANSION * w),
                ):
                    yield from linear_shapes(f"{layer}.{name}", cols, rows)
                for name in ("norm1", "norm2"):
                    yield f"{layer}.{name}.weight", (w,)
                    yield f"{layer}.{name}.bias", (w,)
            yield from linear_shapes(f"blocks.{k}.proj_out", w, out)


class PatchBlock(Watched):
    """The weights of one block: parameters of position t from the transformer's output at t - 1."""

    def __init__(self, config: TarFlowConfig) -> None:
        super().__init__()
        self.bijector: Bijector = Shift() if config.volume_preserving else ExpAffine()
        self.proj_in = nn.Linear(config.dim, config.width)
        self.pos_embed = nn.Parameter(torch.randn(config.length, config.width) * 1e-2)
        self.class_embed: Tensor | None = None
        if config.num_classes:
            self.class_embed = nn.Parameter(torch.randn(config.num_classes, config.width) * 0.3)
        self.net = CausalTransformer(
            length=config.length,
            width=config.width,
            depth=config.layers_per_block,
            head_dim=config.head_dim,
        )
        self.proj_out = nn.Linear(config.width, config.dim * self.bijector.params)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def native(self) -> NativeNet | None:
        """The weights for the compiled functions, where these apply; packed again when one has changed."""
        lib = usable(self.pos_embed)
        if lib is None:
            return None
        return self.watch.fresh(tensors_of(self), lambda: NativeNet(lib, self))

    def bind(self, labels: Tensor | None, attn_temp: float = 1.0) -> BoundPatchBlock:
        """The block for these labels [n]; None and -1 are "no label", the mean class."""
        if self.class_embed is None:
            return BoundPatchBlock(self, None, attn_temp)
        null = self.class_embed.mean(0, keepdim=True)
        if labels is None:
            return BoundPatchBlock(self, null[:, None], attn_temp)
        rows = torch.where(labels[:, None] < 0, null, self.class_embed[labels.clamp_min(0)])
        return BoundPatchBlock(self, rows[:, None], attn_temp)


@dataclass(frozen=True)
class BoundPatchBlock:
    """A `PatchBlock` with its labels: what decoders see."""

    weights: PatchBlock
    condition: Tensor | None  # [n or 1, 1, width]
    attn_temp: float = 1.0
    skip: int = 0  # the nearest predecessors that attention leaves out; for analysis

    @property
    def length(self) -> int:
        return self.weights.net.length

    @property
    def rows(self) -> int | None:
        like, net = self.weights.pos_embed, self.weights.net
        if like.device.type != "cpu":
            return None
        each = 2 * len(net.layers) * net.length * net.width * like.element_size()
        return max(16, CACHE_BYTES // each)

    def select(self, rows: Tensor) -> BoundPatchBlock:
        if self.condition is None or len(self.condition) == 1:
            return self
        return replace(self, condition=self.condition[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        own = [p for name, p in self.weights.named_parameters() if name != "class_embed"]
        return (*own, *(() if self.condition is None else (self.condition,)))

    def new_cache(self, n: int) -> KVCache | NativeCache:
        native = None if self.skip else self.weights.native()
        if native is not None:
            return native.new_cache(n)
        like = self.weights.pos_embed
        return self.weights.net.new_cache(n, dtype=like.dtype, device=like.device)

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        w = self.weights
        native = cache.net if isinstance(cache, NativeCache) else None
        if cache is None and not self.skip:
            native = w.native()
        if native is not None and x.dtype == torch.float32:
            kept = cache if isinstance(cache, NativeCache) else None
            return native(x, lo, hi, self.condition, self.attn_temp, kept)
        parts = []
        if lo == 0:  # nothing stands before the first position: identity
            parts.append(x.new_zeros(len(x), 1, w.proj_out.out_features))
        if hi > 1:
            kv = cache if isinstance(cache, KVCache) else None
            need = max(lo - 1, 0)  # the first input whose output is wanted
            first = 0 if kv is None else min(kv.valid, need)
            if kv is not None:
                kv.valid = first
            h = w.proj_in(x[:, first : hi - 1]) + w.pos_embed[first : hi - 1]
            if self.condition is not None:
                h = h + self.condition
            h = w.net(h, cache=kv, temperature=self.attn_temp, skip=self.skip)
            parts.append(w.proj_out(h[:, need - first :]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def single(self, x: Tensor, z: Tensor, lo: int, hi: int, cache: Cache | None) -> Tensor | None:
        """As `Units.single`: positions lo .. hi - 1 in one call, where there is a function that does it."""
        if not isinstance(cache, NativeCache):
            return None
        return cache.net.single(x, z, lo, hi, self.condition, self.attn_temp, cache)

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.weights.bijector.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.weights.bijector.inverse(z, theta)


class TarFlow(Flow):
    """A flow over images [N, C, H, W] in about [-1, 1]; latents are [N, T, D].

    >>> flow = TarFlow(TarFlowConfig(image_size=8, image_channels=1, patch_size=4, width=64,
    ...                              blocks=2, layers_per_block=1, num_classes=10))
    >>> flow.sample(3, labels=7, seed=0).x.shape
    torch.Size([3, 1, 8, 8])
    """

    config: TarFlowConfig
    family: ClassVar[str] = "tarflow"
    default_tol: ClassVar[float] = 0.5
    default_init: ClassVar[Init] = "previous"
    default_unit: ClassVar[Unit] = "absolute"
    default_deviation: ClassVar[float] = 0.05
    short_solves: ClassVar[bool] = False

    def __init__(self, config: TarFlowConfig) -> None:
        instance(TarFlowConfig, config)
        check_size(config.shapes())
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(PatchBlock(config) for _ in range(config.blocks))
        self.register_buffer("var", torch.ones(config.length, config.dim))
        backwards = torch.arange(config.length).flip(0)
        self.register_buffer("backwards", backwards, persistent=False)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.config.length, self.config.dim)

    @property
    def data_shape(self) -> tuple[int, ...]:
        c = self.config
        return (c.image_channels, c.image_size, c.image_size)

    @property
    def num_classes(self) -> int:
        return self.config.num_classes

    def to_sequence(self, x: Tensor) -> Tensor:
        """Patches row by row; inside a patch channel, row, column."""
        c, p = self.config, self.config.patch_size
        g = c.image_size // p
        x = x.reshape(len(x), c.image_channels, g, p, g, p).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(len(x), c.length, c.dim)

    def from_sequence(self, x: Tensor) -> Tensor:
        c, p = self.config, self.config.patch_size
        g = c.image_size // p
        x = x.reshape(len(x), g, g, c.image_channels, p, p).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(x), c.image_channels, c.image_size, c.image_size)

    def order(self, k: int) -> Tensor | None:
        return self.backwards if k % 2 else None  # type: ignore[return-value]

    def bind(self, k: int, condition: Tensor | None, guidance: Guidance) -> Block:
        weights = self.blocks[k]
        assert isinstance(weights, PatchBlock)
        block = weights.bind(condition)
        if not guidance.weight:
            return block
        return GuidedBlock(block, weights.bind(None, guidance.attn_temp), guidance)

    def compiled(self, block: Block) -> Block:
        if isinstance(block, GuidedBlock):
            return replace(block, block=CompiledBlock(block.block), null=CompiledBlock(block.null))
        return CompiledBlock(block)

    def prior_var(self) -> Tensor:
        return self.var  # type: ignore[return-value]
