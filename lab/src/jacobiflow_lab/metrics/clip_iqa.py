"""CLIP-IQA: the probability that CLIP finds an image nearer to "Good photo." than to "Bad photo."

Wang et al., 2022, by torchmetrics, with any CLIP in the format of transformers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow_lab.metrics.errors import MetricError, optional
from jacobiflow_lab.metrics.inception import as_pixels

PUBLIC = "openai/clip-vit-base-patch16"
GIVE = (
    "give one as --clip (clip= in Python): a folder with config.json, model.safetensors and the files of "
    f"tokenizer and processor, or a hub id such as {PUBLIC}"
)


@dataclass(frozen=True, kw_only=True)
class ClipIQA:
    """Mean score over images, 0 to 1, and its standard error; higher is better."""

    value: float
    error: float
    images: int
    clip: str


class _Plain(nn.Module):
    """A CLIP whose features are tensors, in whatever form this version of transformers returns them."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def get_text_features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return _tensor(self.clip.get_text_features(input_ids=ids, attention_mask=mask))

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return _tensor(self.clip.get_image_features(pixel_values=pixels))


def _tensor(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found.pooler_output


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without the bars and advice of transformers: what is wrong is raised."""
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


class ClipScorer:
    """Scores images with the CLIP at a path or hub id.

    Only the weights of safetensors files are read, and no code that comes with them is run.
    """

    def __init__(self, clip: str | None, device: torch.device | str = "cpu") -> None:
        if not clip:
            raise MetricError(f"CLIP-IQA needs the weights of a CLIP: {GIVE}")
        module = optional("torchmetrics.multimodal.clip_iqa", "CLIP-IQA")
        transformers = optional("transformers", "CLIP-IQA")
        self.clip = clip

        def load() -> tuple[nn.Module, Any]:
            model = transformers.CLIPModel.from_pretrained(clip, use_safetensors=True)
            return _Plain(model.eval()), transformers.CLIPProcessor.from_pretrained(clip)

        try:
            with warnings.catch_warnings(), _quiet(transformers.utils.logging):
                warnings.simplefilter("ignore")
                self.metric = module.CLIPImageQualityAssessment(load, sync_on_compute=False).to(device)
        except MetricError:
            raise
        except Exception as error:  # which of many, depends on what is missing or damaged
            reason = (str(error).split("\n")[0] or type(error).__name__)[:120]
            raise MetricError(f"CLIP-IQA: {clip} holds no CLIP that can be used ({reason}): {GIVE}") from None

    def __call__(self, images: Tensor) -> Tensor:
        """Scores [N] of images [N, 1 or 3, H, W], uint8 or floats in [-1, 1]."""
        pixels = as_pixels(images).expand(-1, 3, -1, -1)
        self.metric.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.metric.update(pixels.to(self.metric.device))  # 0 .. 255: the processor scales them itself
            found: Tensor = self.metric.compute()
        return found.reshape(-1).double().cpu()


def mean_clip_iqa(scores: Tensor, clip: str) -> ClipIQA:
    """Over images, of their scores [N]."""
    if len(scores) < 2:
        raise MetricError(f"CLIP-IQA: {len(scores)} images have a score, 2 are needed")
    return ClipIQA(
        value=float(scores.mean()),
        error=float(scores.std() / len(scores) ** 0.5),
        images=len(scores),
        clip=clip,
    )
