"""Fast sampling of autoregressive normalizing flows, as exact as you ask.

>>> import jacobiflow as jf
>>> flow = jf.MAF(jf.MAFConfig(features=4, blocks=2, hidden=(16,)))
>>> flow.sample(3, seed=0).x.shape
torch.Size([3, 4])
"""

from jacobiflow.adapters.accelerate import (
    Acceleration,
    AccelerationError,
    accelerate,
    accelerated,
    acceleration,
    restore,
)
from jacobiflow.adapters.own_made import OwnMADE
from jacobiflow.adapters.tarflow_checkpoint import import_tarflow
from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.method import Method, Plan, PlanError
from jacobiflow.core.pictures import save_images
from jacobiflow.core.results import BlockStats, Decoded, DecodingError, Encoded, JacobiflowError, Stats, Status, Sweep
from jacobiflow.flows.bundled import models
from jacobiflow.flows.checkpoint import CheckpointError, load
from jacobiflow.flows.flow import Flow, NonfiniteError
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig
from jacobiflow.flows.tune import tune

__version__ = "0.2.0"

__all__ = [
    "MAF",
    "Acceleration",
    "AccelerationError",
    "Block",
    "BlockStats",
    "CheckpointError",
    "Decoded",
    "DecodingError",
    "Encoded",
    "Flow",
    "Guidance",
    "JacobiflowError",
    "MAFConfig",
    "Method",
    "NonfiniteError",
    "OwnMADE",
    "Plan",
    "PlanError",
    "Stats",
    "Status",
    "Sweep",
    "TarFlow",
    "TarFlowConfig",
    "accelerate",
    "accelerated",
    "acceleration",
    "decode",
    "import_tarflow",
    "load",
    "models",
    "restore",
    "save_images",
    "tune",
]
