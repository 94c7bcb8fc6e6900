"""What the flow is compared with: a diffusion model and a GAN, each at the flow's own training budget."""

from jacobiflow.paper.baselines.learner import Generator, Learner
from jacobiflow.paper.baselines.training import KINDS, load_baseline, train_baseline

__all__ = ["KINDS", "Generator", "Learner", "load_baseline", "train_baseline"]
