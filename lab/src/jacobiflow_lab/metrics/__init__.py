"""How good samples are: see `evaluate`.

>>> from jacobiflow_lab import metrics
>>> import torch
>>> metrics.frechet(torch.zeros(1), torch.eye(1), torch.ones(1), torch.eye(1))
1.0
"""

from jacobiflow_lab.metrics.brisque import Brisque, brisque_scores, mean_brisque
from jacobiflow_lab.metrics.clip_iqa import ClipIQA, ClipScorer, mean_clip_iqa
from jacobiflow_lab.metrics.errors import MetricError
from jacobiflow_lab.metrics.evaluation import METRICS, Report, check_request, evaluate, evaluate_pictures
from jacobiflow_lab.metrics.fid import FID, KID, Moments, fid_of, frechet, kid
from jacobiflow_lab.metrics.inception import Inception, Network, as_pixels, features, load_inception
from jacobiflow_lab.metrics.likelihood import BitsPerDim
from jacobiflow_lab.metrics.paired import Paired, paired_distance
from jacobiflow_lab.metrics.pictures import Judges, real_moments
from jacobiflow_lab.metrics.reconstruction import Invertibility, Reconstruction, reconstruct
from jacobiflow_lab.metrics.shares import Shares

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
