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

from jacobiflow_lab.metrics.inception import as_pixels
from jacobiflow_lab.metrics.metric import Metric, MetricError, mean_and_error, optional

HOW_TO_GIVE_ONE = (
    "give one as --clip (clip= in Python): a folder with config.json, model.safetensors and the files of "
    "tokenizer and processor, or a hub id such as openai/clip-vit-base-patch16"
)


@dataclass(frozen=True, kw_only=True)
class ClipIQA:
    """Mean score over images, 0 to 1, and its standard error; higher is better."""

    value: float
    error: float
    images: int
    clip: str


class _TensorFeatures(nn.Module):
    """A CLIP whose features are tensors, in whatever form this version of transformers returns them."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip

    def get_text_features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return _tensor(self.clip.get_text_features(input_ids=ids, attention_mask=mask))

    def get_image_features(self, pixels: Tensor) -> Tensor:
        return _tensor(self.clip.get_image_features(pixel_values=pixels))


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Hide the progress bars and advice of transformers; errors are raised."""
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
            raise MetricError(f"CLIP-IQA needs the weights of a CLIP: {HOW_TO_GIVE_ONE}")
        module = optional("torchmetrics.multimodal.clip_iqa", "CLIP-IQA")
        transformers = optional("transformers", "CLIP-IQA")
        self.clip = clip

        def load() -> tuple[nn.Module, Any]:
            model = transformers.CLIPModel.from_pretrained(clip, use_safetensors=True)
            return _TensorFeatures(model.eval()), transformers.CLIPProcessor.from_pretrained(clip)

        try:
            with warnings.catch_warnings(), _quiet(transformers.utils.logging):
                warnings.simplefilter("ignore")
                self.metric = module.CLIPImageQualityAssessment(load, sync_on_compute=False).to(device)
        except MetricError:
            raise
        except Exception as error:  # its type depends on what is missing or damaged
            reason = (str(error).split("\n")[0] or type(error).__name__)[:120]
            raise MetricError(f"CLIP-IQA: {clip} is not a usable CLIP ({reason}): {HOW_TO_GIVE_ONE}") from None

    def __call__(self, images: Tensor) -> Tensor:
        """Scores [N] of images [N, 1 or 3, H, W], uint8 or floats in [-1, 1]."""
        pixels = as_pixels(images).expand(-1, 3, -1, -1)
        self.metric.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.metric.update(pixels.to(self.metric.device))  # 0 .. 255: the processor scales them itself
            scores: Tensor = self.metric.compute()
        return scores.reshape(-1).double().cpu()


def mean_clip_iqa(scores: Tensor, clip: str) -> ClipIQA:
    """The mean of scores [N]."""
    return ClipIQA(**mean_and_error("CLIP-IQA", scores), clip=clip)


CLIP_IQA = Metric(
    name="clip-iqa",
    help='probability of "Good photo." against "Bad photo." by a CLIP; higher is better',
    needs=("images", "clip"),
    packages=("torchmetrics", "transformers"),
    score=ClipScorer,
    rows=(("CLIP-IQA", "{value:.4f} ± {error:.4f}", "higher", "{images:,} samples"),),
    result=lambda evidence: mean_clip_iqa(evidence["samples"].scores["clip-iqa"], evidence["clip"]),
)
