"""TarFlow: images as sequences of patches, each block a causal transformer.

Zhai et al., 2024, Normalizing Flows are Capable Generative Models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.core.arguments import number, set_fields, set_ints, switch
from jacobiflow.core.bijectors import Bijector, ExpAffine, Shift
from jacobiflow.core.block import Conditioner
from jacobiflow.core.method import Unit
from jacobiflow.core.rows import Noise
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance, Guided
from jacobiflow.flows.transformer import EXPANSION, CausalTransformer, TransformerConditioner
from jacobiflow.flows.weights import MemoModule, linear_shapes


@dataclass(frozen=True, kw_only=True)
class TarFlowConfig:
    """The shape of a TarFlow and the noise that it was trained with.

    The sequence has (image_size / patch_size)^2 positions of image_channels * patch_size^2 numbers.
    """

    image_size: int  # Height and width of the images, in pixels.
    image_channels: int = 3  # 3 for colour images, 1 for grey ones.
    patch_size: int = 4  # Side of a patch, in pixels.
    width: int = 256  # Width of the transformers, a multiple of head_dim.
    blocks: int = 8  # Blocks of the flow, each a transformer.
    layers_per_block: int = 8  # Layers of each transformer.
    head_dim: int = 64  # Width of one attention head.
    num_classes: int = 0  # Classes of the labels; 0: the model takes none.
    volume_preserving: bool = False  # Blocks shift only, without scales.
    noise_std: float = 0.0  # Of the gaussian noise of training, on images in [-1, 1]; `denoise` removes it.
    # Noise of the training data; training records it. None: unknown.
    noise: Noise | None = field(default=None, repr=False, compare=False)
    # Names of the classes; empty: those of the data.
    class_names: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        set_ints(self, "TarFlowConfig", image_size=1, image_channels=1, patch_size=1, width=1, head_dim=1)
        set_ints(self, "TarFlowConfig", blocks=1, layers_per_block=1, num_classes=0)
        set_fields(self, "TarFlowConfig", number, "noise_std")
        set_fields(self, "TarFlowConfig", switch, "volume_preserving")
        for part, whole in (("patch_size", "image_size"), ("head_dim", "width")):
            if (all_of := getattr(self, whole)) % (one := getattr(self, part)):
                raise ValueError(f"TarFlowConfig.{part} {one} does not divide {whole} {all_of}")
        if self.noise_std < 0:
            raise ValueError(f"TarFlowConfig.noise_std must be finite and not negative, not {self.noise_std}")
        given: Any = self.class_names
        names = () if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
        different = {name for name in names if isinstance(name, str)}
        if (given and not names) or len(different) != len(names) or len(names) not in (0, self.num_classes):
            wrong = f"TarFlowConfig.class_names must be {self.num_classes} different names"
            raise ValueError(f"{wrong}, not {short(given)}")
        object.__setattr__(self, "class_names", names)

    @property
    def length(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def dim(self) -> int:
        return self.image_channels * self.patch_size**2

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all stored tensors, without making any."""
        w, d = self.width, self.dim
        yield "var", (self.length, d)
        for k in range(self.blocks):
            yield f"blocks.{k}.pos_embed", (self.length, w)
            if self.num_classes:
                yield f"blocks.{k}.class_embed", (self.num_classes, w)
            yield from linear_shapes(f"blocks.{k}.proj_in", d, w)
            for i in range(self.layers_per_block):
                layer, hidden = f"blocks.{k}.net.layers.{i}", EXPANSION * w
                for name, a, b in (("qkv", w, 3 * w), ("proj", w, w), ("up", w, hidden), ("down", hidden, w)):
                    yield from linear_shapes(f"{layer}.{name}", a, b)
                for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
                    yield f"{layer}.{name}", (w,)
            yield from linear_shapes(f"blocks.{k}.proj_out", w, d if self.volume_preserving else 2 * d)


class PatchBlock(MemoModule):
    """The weights of one block: parameters of position t from the transformer's output at t - 1."""

    def __init__(self, config: TarFlowConfig) -> None:
        super().__init__()
        self.bijector: Bijector = Shift() if config.volume_preserving else ExpAffine()
        self.proj_in = nn.Linear(config.dim, config.width)
        self.pos_embed = nn.Parameter(torch.randn(config.length, config.width) * 1e-2)
        self.class_embed: Tensor | None = None
        if config.num_classes:
            self.class_embed = nn.Parameter(torch.randn(config.num_classes, config.width) * 0.3)
        shape = {"length": config.length, "width": config.width, "head_dim": config.head_dim}
        self.net = CausalTransformer(depth=config.layers_per_block, **shape)
        self.proj_out = nn.Linear(config.width, config.dim * self.bijector.params)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def condition(self, labels: Tensor | None) -> Tensor | None:
        """What labels [n] add to the inputs, [n or 1, 1, width]; None and -1 are the mean class."""
        if self.class_embed is None:
            return None
        null = self.class_embed.mean(0, keepdim=True)
        if labels is not None:
            null = torch.where(labels[:, None] < 0, null, self.class_embed[labels.clamp_min(0)])
        return null[:, None]

    def bind(self, labels: Tensor | None, n: int, guidance: Guidance) -> Conditioner:
        informed = self.condition(labels)
        if not guidance.weight:
            return TransformerConditioner(self, informed)
        if guidance.what == "a" and isinstance(self.bijector, Shift):
            raise ValueError("guidance on 'a' changes nothing in a volume-preserving flow: use 'b' or 'ab'")
        both, dim = None, self.proj_in.in_features
        if informed is not None and (null := self.condition(None)) is not None:
            both = torch.cat((informed.expand(n, -1, -1), null.expand(n, -1, -1)))
        one = self.pos_embed.new_ones(n)
        return Guided(TransformerConditioner(self, both, torch.cat((one, one * guidance.attn_temp))), n, dim, guidance)


class TarFlow(Flow):
    """A flow over images [N, C, H, W] in about [-1, 1]; latents are [N, T, D].

    >>> flow = TarFlow(TarFlowConfig(image_size=8, image_channels=1, patch_size=4, width=64,
    ...                              blocks=2, layers_per_block=1, num_classes=10))
    >>> flow.sample(3, labels=7, seed=0).x.shape
    torch.Size([3, 1, 8, 8])
    """

    config: TarFlowConfig
    family: ClassVar[str] = "tarflow"
    config_type = TarFlowConfig
    default_tol: ClassVar[float] = 0.5
    default_unit: ClassVar[Unit] = "absolute"
    default_deviation: ClassVar[float] = 0.05

    def __init__(self, config: TarFlowConfig) -> None:
        super().__init__(config)
        self.data_shape = (config.image_channels, config.image_size, config.image_size)
        self.latent_shape = (config.length, config.dim)
        self.num_classes, self.class_names = config.num_classes, config.class_names
        self.noise_std = config.noise_std
        self.blocks = nn.ModuleList(PatchBlock(config) for _ in range(config.blocks))
        self.register_buffer("var", torch.ones(config.length, config.dim))
        for k in range(config.blocks):
            self.register_buffer(f"order{k}", torch.arange(config.length).flip(0) if k % 2 else None, persistent=False)

    def to_sequence(self, x: Tensor) -> Tensor:
        """Patches row by row; inside a patch channel, row, column."""
        c, p, g = self.config, self.config.patch_size, self.config.image_size // self.config.patch_size
        x = x.reshape(len(x), c.image_channels, g, p, g, p).permute(0, 2, 4, 1, 3, 5)
        return x.reshape(len(x), c.length, c.dim)

    def from_sequence(self, x: Tensor) -> Tensor:
        c, p, g = self.config, self.config.patch_size, self.config.image_size // self.config.patch_size
        x = x.reshape(len(x), g, g, c.image_channels, p, p).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(len(x), *self.data_shape)

    def bind(self, k: int, n: int, condition: Tensor | None, guidance: Guidance) -> tuple[Conditioner, Bijector]:
        block: Any = self.blocks[k]
        return block.bind(condition, n, guidance), block.bijector
