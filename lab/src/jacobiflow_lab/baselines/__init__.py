"""A diffusion model and a GAN that the flow is compared with, each trained for as long as the flow."""

from jacobiflow_lab.baselines.learner import Learner, TrainedBaseline
from jacobiflow_lab.baselines.training import KINDS, load_baseline, train_baseline

__all__ = ["KINDS", "Learner", "TrainedBaseline", "load_baseline", "train_baseline"]
