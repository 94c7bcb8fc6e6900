"""What the flow is compared with: a diffusion model and a GAN, each at the flow's own training budget."""

from jacobiflow_lab.baselines.learner import Generator, Learner
from jacobiflow_lab.baselines.training import KINDS, load_baseline, train_baseline

__all__ = ["KINDS", "Generator", "Learner", "load_baseline", "train_baseline"]
