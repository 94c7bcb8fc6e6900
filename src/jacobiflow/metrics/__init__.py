"""How good samples are: see `evaluate`.

>>> from jacobiflow import metrics
>>> import torch
>>> metrics.frechet(torch.zeros(1), torch.eye(1), torch.ones(1), torch.eye(1))
1.0
"""

from jacobiflow.metrics.brisque import Brisque, brisque_scores, mean_brisque
from jacobiflow.metrics.clip_iqa import ClipIQA, ClipScorer, mean_clip_iqa
from jacobiflow.metrics.errors import MetricError
from jacobiflow.metrics.evaluation import METRICS, Report, check_request, evaluate, evaluate_pictures
from jacobiflow.metrics.fid import FID, KID, Moments, fid_of, frechet, kid
from jacobiflow.metrics.inception import Inception, Network, as_pixels, features, load_inception
from jacobiflow.metrics.likelihood import BitsPerDim
from jacobiflow.metrics.paired import Paired, paired_distance
from jacobiflow.metrics.pictures import Judges, real_moments
from jacobiflow.metrics.reconstruction import Invertibility, Reconstruction, reconstruct
from jacobiflow.metrics.shares import Shares

__all__ = [
    "FID",
    "KID",
    "METRICS",
    "BitsPerDim",
    "Brisque",
    "ClipIQA",
    "ClipScorer",
    "Inception",
    "Invertibility",
    "Judges",
    "MetricError",
    "Moments",
    "Network",
    "Paired",
    "Reconstruction",
    "Report",
    "Shares",
    "as_pixels",
    "brisque_scores",
    "check_request",
    "evaluate",
    "evaluate_pictures",
    "features",
    "fid_of",
    "frechet",
    "kid",
    "load_inception",
    "mean_brisque",
    "mean_clip_iqa",
    "paired_distance",
    "real_moments",
    "reconstruct",
]
