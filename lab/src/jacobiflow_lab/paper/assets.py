"""Loads what items need: models, training runs and data. Anything that is not there raises Missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jacobiflow.core.results import JacobiflowError
from jacobiflow.data.decoding import Images
from jacobiflow.data.sources import load_images
from jacobiflow.flows.checkpoint import CONFIG, bundled_names, load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig
from jacobiflow.training.recipe import Recipe
from jacobiflow_lab.analysis.sweeps import kept
from jacobiflow_lab.paper.models import MODELS, Model
from jacobiflow_lab.paper.schema import Missing

if TYPE_CHECKING:
    from jacobiflow_lab.paper.session import Session


def load_flow(session: Session, name: str) -> Flow:
    """The model of that name: a trained folder, else the bundled one."""
    if name in session.scale.random:
        return random_flow(session.scale.random[name]).to(session.device)
    folder = model_folder(session, name)
    if folder is None and name not in bundled_names():
        folder = train_missing(session, MODELS[name])
    return load(folder or name, device=session.device)


def random_flow(config: dict[str, Any]) -> TarFlow:
    """A TarFlow of this shape whose weights are small random numbers: for what does not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        flow = TarFlow(TarFlowConfig(**({"blocks": 1, "image_channels": 3} | config)))
        with torch.no_grad():
            for p in flow.parameters():
                p.add_(0.01 * torch.randn_like(p))
    return flow.requires_grad_(False)


def model_folder(session: Session, name: str) -> Path | None:
    """The run or checkpoint folder of a model under --models-dir, if there is one."""
    for base in (*session.models_dirs, session.out / "trained"):
        for path in (base / name / "model", base / name):
            if (path / CONFIG).is_file():
                return path
    return None


def train_missing(session: Session, model: Model) -> Path:
    """The folder of a model that is trained now, with --train-missing."""
    if session.train is None:
        convert = ", or convert a public checkpoint" if session.scale.name == "paper" else ""
        raise Missing(
            f"no weights of {model.name}: train it with `{train_command(session, model)}` "
            f"(about {model.hours:g} h){convert} and give --models-dir models, or add --train-missing"
        )
    run = session.out / "trained" / model.name
    session.note(f"training {model.name} by its recipe, about {model.hours:g} h")
    session.train(model, run)
    return run / "model"


def train_command(session: Session, model: Model) -> str:
    """The command that trains a model on the data in --data-dir."""
    source = Recipe.load(model.recipe).data.source
    local = f" --data.source {(session.data_dir or Path()) / source}" if source.endswith(".npz") else ""
    return f"jacobiflow train {model.recipe}{local} --out models/{model.name}"


def training_run(session: Session, name: str) -> Path:
    """The folder of a model's training run, with the checkpoints that it kept."""
    folder = model_folder(session, name)
    run = folder.parent if folder is not None and folder.name == "model" else folder
    if run is None or not kept(run):
        raise Missing(
            f"no checkpoints from the training run of {name}: train it with "
            f"`{train_command(session, MODELS[name])}` and give --models-dir models"
        )
    return run


def local_recipe(session: Session, model: Model) -> Recipe:
    """The recipe of a model, with the data in --data-dir."""
    recipe = Recipe.load(model.recipe)
    source = recipe.data.source
    if source and session.data_dir is not None and (session.data_dir / source).exists():
        source = str(session.data_dir / source)
    return replace(recipe, data=replace(recipe.data, source=source))


def load_data(session: Session, model: Model, flow: Flow) -> tuple[Images, Images]:
    """Training and test images in the flow's own shape."""
    data = local_recipe(session, model).data
    if data.source.endswith(".npz") and not Path(data.source).exists():
        where = f"is not in {session.data_dir}" if session.data_dir else "is needed"
        raise Missing(f"no data: {data.source} {where}, give its folder with --data-dir")
    assert flow.image_shape is not None, "only flows of images have data"
    channels, side, _ = flow.image_shape
    try:
        return load_images(data, image_size=side, channels=channels, num_classes=flow.num_classes)
    except JacobiflowError as error:
        raise Missing(f"no data: {error}") from None
