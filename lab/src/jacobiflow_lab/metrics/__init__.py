"""How good samples are: see `evaluate`.

>>> from jacobiflow_lab import metrics
>>> import torch
>>> metrics.frechet(torch.zeros(1), torch.eye(1), torch.ones(1), torch.eye(1))
1.0
"""

from jacobiflow_lab.metrics.bootstrap import paired_changes
from jacobiflow_lab.metrics.brisque import brisque_scores, mean_brisque
from jacobiflow_lab.metrics.clip_iqa import ClipScorer, mean_clip_iqa
from jacobiflow_lab.metrics.errors import MetricError
from jacobiflow_lab.metrics.evaluation import Report, evaluate, evaluate_pictures
from jacobiflow_lab.metrics.fid import fid_of, frechet, kid
from jacobiflow_lab.metrics.inception import as_pixels, features, load_inception
from jacobiflow_lab.metrics.metric import Metric
from jacobiflow_lab.metrics.moments import Moments, real_moments
from jacobiflow_lab.metrics.paired import paired_distance
from jacobiflow_lab.metrics.reconstruction import reconstruct
from jacobiflow_lab.metrics.registry import METRICS
from jacobiflow_lab.metrics.samples import Draw

__all__ = [
    "METRICS",
    "ClipScorer",
    "Draw",
    "Metric",
    "MetricError",
    "Moments",
    "Report",
    "as_pixels",
    "brisque_scores",
    "evaluate",
    "evaluate_pictures",
    "features",
    "fid_of",
    "frechet",
    "kid",
    "load_inception",
    "mean_brisque",
    "mean_clip_iqa",
    "paired_changes",
    "paired_distance",
    "real_moments",
    "reconstruct",
]
