"""How good samples are: see `evaluate`.

>>> from jacobiflow_lab import metrics
>>> import torch
>>> metrics.frechet(torch.zeros(1), torch.eye(1), torch.ones(1), torch.eye(1))
1.0
"""

from jacobiflow_lab.metrics.bootstrap import paired_changes as paired_changes
from jacobiflow_lab.metrics.brisque import brisque_scores as brisque_scores
from jacobiflow_lab.metrics.brisque import mean_brisque as mean_brisque
from jacobiflow_lab.metrics.clip_iqa import ClipScorer as ClipScorer
from jacobiflow_lab.metrics.clip_iqa import mean_clip_iqa as mean_clip_iqa
from jacobiflow_lab.metrics.evaluation import Report as Report
from jacobiflow_lab.metrics.evaluation import evaluate as evaluate
from jacobiflow_lab.metrics.evaluation import evaluate_pictures as evaluate_pictures
from jacobiflow_lab.metrics.fid import fid_of as fid_of
from jacobiflow_lab.metrics.fid import frechet as frechet
from jacobiflow_lab.metrics.fid import kid as kid
from jacobiflow_lab.metrics.inception import as_pixels as as_pixels
from jacobiflow_lab.metrics.inception import features as features
from jacobiflow_lab.metrics.inception import load_inception as load_inception
from jacobiflow_lab.metrics.metric import Metric as Metric
from jacobiflow_lab.metrics.metric import MetricError as MetricError
from jacobiflow_lab.metrics.moments import Moments as Moments
from jacobiflow_lab.metrics.moments import real_moments as real_moments
from jacobiflow_lab.metrics.paired import paired_distance as paired_distance
from jacobiflow_lab.metrics.reconstruction import reconstruct as reconstruct
from jacobiflow_lab.metrics.registry import METRICS as METRICS
