"""Damaged files by the hundred, read in this process under a watchdog; test_fuzz.py starts it as a child.

Whatever is read must be right, or refused with the project's own error, within LIMIT seconds of this
process's time and ROOM bytes more than it holds at the start. A crash, a hang or another exception ends
the process with a status that is not 0; otherwise it prints how many of each kind were read and refused.
"""

from __future__ import annotations

import faulthandler
import io
import json
import random
import resource
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import jacobiflow as jf
from adapters.test_tarflow_checkpoint import Shape, public
from jacobiflow.data.sources import DataConfig, load_images
from jacobiflow.jobs.manifest import Job
from jacobiflow.jobs.sampling import Settings
from jacobiflow.training.recipe import Recipe, recipe_names
from jacobiflow.training.state import State
from subjects import maf, tarflow

LIMIT, ROOM = 5, 2**30
COUNTS = {
    "config": 300,
    "weights": 300,
    "public": 150,
    "plan": 400,
    "recipe": 400,
    "picture": 400,
    "npz": 200,
    "state": 100,
    "manifest": 100,
}

# What byte-wise damage seldom makes: values of other kinds and sizes in the place of a value.
WORDS = ("0", "-1", "1e400", "NaN", "Infinity", "null", "true", "[]", "{}", '""', '"../../etc/passwd"')
WORDS += (str(2**31), str(2**63), "9" * 400, "9" * 5000, "0.1", "[" * 3000, '{"a":' * 3000, "\ud800")
values = st.one_of(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8),
    st.integers(-3, 70),
    st.integers(-(2**70), 2**70),
    st.lists(st.integers(-3, 30), max_size=6),
    st.dictionaries(st.text(max_size=3), st.lists(st.integers()), max_size=3),
)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """`data` with one to four pieces flipped, cut out, put twice, overwritten or cut off."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        to = min(len(found), at + draw.choice((1, 2, 4, 8, 100, len(found))))
        kind = draw.randrange(7)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            del found[at:to]
        elif kind == 3:
            found[at:at] = found[at:to]
        elif kind == 4:
            found[at:to] = draw.randbytes(to - at)
        elif kind == 5:
            found[at : at + 4] = draw.choice((b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
        else:
            found[at:to] = draw.choice(WORDS).encode(errors="surrogatepass")
    return bytes(found)


def replaced(doc: Any, where: int, value: Any) -> Any:
    """A copy of plain data with one value, or one key's name, in it replaced."""
    places: list[tuple[Any, Any]] = []
    root = [json.loads(json.dumps(doc))]

    def visit(holder: Any, key: Any) -> None:
        places.append((holder, key))
        inner = holder[key]
        keys = range(len(inner)) if isinstance(inner, list) else inner if isinstance(inner, dict) else ()
        for k in list(keys):
            visit(inner, k)

    visit(root, 0)
    holder, key = places[where % len(places)]
    if isinstance(holder, dict) and isinstance(value, str) and where % 3 == 0:
        holder[value] = holder.pop(key)
    else:
        holder[key] = value
    return root[0]


def damaged(text: str, draw: random.Random, where: int, value: Any) -> bytes:
    """JSON with other bytes, or with another value in it."""
    if where % 2:
        return mutate(text.encode(), draw)
    return json.dumps(replaced(json.loads(text), where, value)).encode()


class Fuzz:
    """The files to damage, and what each kind of them must come to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, Counter[str]()
        small = {"image_size": 4, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
        self.flows = [
            tarflow(0.2, **small, num_classes=3),
            maf(1.0, features=4, blocks=2, hidden=(6,), transform="spline", order=((3, 1, 0, 2), (0, 1, 2, 3))),
            maf(1.0, features=4, blocks=2, hidden=(6, 6), context=2, residual=True),
        ]
        for i, flow in enumerate(self.flows):
            flow.save(folder / f"model{i}")
        state, stream = (
            public(Shape(size=4, channels=1, blocks=1, layers=1), dtype=torch.float32),
            io.BytesIO(),
        )
        torch.save(state, stream)
        self.public = [(".pth", stream.getvalue()), (".safetensors", safetensors.torch.save(state))]
        self.plan = jf.Plan((jf.Method(width=1), jf.Method(width=3, tol=0.5, max_sweeps=9)), about={"s": 1.5})
        self.recipes = [Recipe.load(name).to_dict() for name in recipe_names()]
        self.pictures = list(pictures())
        stream = io.BytesIO()
        x = np.arange(10 * 6 * 6, dtype=np.uint8).reshape(10, 6, 6)
        np.savez_compressed(stream, x_train=x, y_train=np.arange(10), x_test=x[:2], y_test=np.arange(2))
        self.npz = stream.getvalue()

    def attempt(self, kind: str, read: Callable[[], None]) -> None:
        """Read under the watchdog; only the project's own errors may come out."""
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # files that are left out are told of
                read()
            self.seen[f"{kind} read"] += 1
        except jf.JacobiflowError:
            self.seen[f"{kind} refused"] += 1
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def checkpoint(self, kind: str, which: int, name: str, data: bytes) -> None:
        folder = self.folder / f"model{which}"
        path = folder / name
        whole = path.read_bytes()
        path.write_bytes(data)
        try:
            self.attempt(kind, lambda: self.use(which, jf.load(folder)))
        finally:
            path.write_bytes(whole)

    def use(self, which: int, flow: jf.Flow) -> None:
        """What was read has the weights that were saved, and samples."""
        for name, value in self.flows[which].state_dict().items():
            assert torch.equal(flow.state_dict()[name], value)
        given = {"context": torch.zeros(1, flow.context_features)} if flow.context_features else {}
        assert flow.sample(1, seed=0, **given).x.shape[1:] == flow.data_shape

    def config(self, draw: random.Random, where: int, value: Any) -> None:
        which = draw.randrange(len(self.flows))
        text = (self.folder / f"model{which}/config.json").read_text()
        self.checkpoint("config", which, "config.json", damaged(text, draw, where, value))

    def weights(self, draw: random.Random, where: int, value: Any) -> None:
        which = draw.randrange(len(self.flows))
        data = (self.folder / f"model{which}/model.safetensors").read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")
        if where % 3 == 0:  # the header says something else
            doc = json.dumps(replaced(json.loads(data[8:head]), where, value)).encode()
            found = len(doc).to_bytes(8, "little") + doc + data[head:]
        elif where % 3 == 1:  # its bytes are damaged
            found = mutate(data[:head], draw) + data[head:]
        else:
            found = mutate(data, draw)
        self.checkpoint("weights", which, "model.safetensors", found)

    def foreign(self, draw: random.Random, where: int, value: Any) -> None:
        suffix, data = draw.choice(self.public)
        path = self.folder / f"public{suffix}"
        path.write_bytes(mutate(data, draw))

        def read() -> None:
            flow = jf.import_tarflow(path, image_channels=1)
            assert flow.sample(1, seed=0).x.shape[1:] == flow.data_shape

        self.attempt("public", read)

    def plans(self, draw: random.Random, where: int, value: Any) -> None:
        path = self.folder / "plan.json"
        path.write_bytes(damaged(self.plan.to_json(), draw, where, value))

        def read() -> None:
            plan = jf.Plan.load(path)
            assert jf.Plan.from_json(plan.to_json()) == plan
            self.flows[0].sample(1, seed=0, plan=path)

        self.attempt("plan", read)

    def recipe(self, draw: random.Random, where: int, value: Any) -> None:
        doc, path = draw.choice(self.recipes), self.folder / "recipe.toml"
        data = mutate(toml(doc).encode(), draw)
        if where % 2:
            data = toml(replaced(doc, where, value)).encode(errors="surrogatepass")
        path.write_bytes(data)

        def read() -> None:
            recipe = Recipe.load(path)
            assert asdict(Recipe.from_dict(recipe.to_dict())) == asdict(recipe)

        self.attempt("recipe", read)

    def picture(self, draw: random.Random, where: int, value: Any) -> None:
        folder = self.folder / "pictures"
        folder.mkdir(exist_ok=True)
        suffix, data = draw.choice(self.pictures)
        path = folder / f"b{draw.choice((suffix, suffix, '.png', '.gif'))}"
        Image.new("L", (6, 6)).save(folder / "a.png")
        path.write_bytes(mutate(data, draw))

        def read() -> None:
            train, held = load_images(DataConfig(source=str(folder), validation=0), image_size=5, channels=3)
            assert train.pixels.shape in ((1, 3, 5, 5), (2, 3, 5, 5))
            assert len(held) == 0
            if len(train) == 1:
                raise jf.JacobiflowError("left out")

        try:
            self.attempt("picture", read)
        finally:
            path.unlink()

    def arrays(self, draw: random.Random, where: int, value: Any) -> None:
        path = self.folder / "data.npz"
        path.write_bytes(mutate(self.npz, draw))

        def read() -> None:
            train, _ = load_images(DataConfig(source=str(path)), image_size=5, channels=1, num_classes=10)
            assert train.pixels.shape[1:] == (1, 5, 5)
            assert train.labels is not None
            assert len(train.labels) == len(train)

        self.attempt("npz", read)

    def state(self, draw: random.Random, where: int, value: Any) -> None:
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        want = {name: p.clone() for name, p in model.state_dict().items()}
        subject = State(self.folder, {"training.lr": 0.1}, model, optimizer, None)
        subject.save(5)
        path = self.folder / "state.safetensors"
        path.write_bytes(mutate(path.read_bytes(), draw))

        def read() -> None:
            subject.load()
            assert all(torch.equal(p, want[name]) for name, p in model.state_dict().items())
            optimizer.step()

        self.attempt("state", read)

    def manifest(self, draw: random.Random, where: int, value: Any) -> None:
        job = Job(
            settings=Settings(n=30, labels=(0, 1)),
            model="mnist-small",
            plan=self.plan,
            batch=4,
            shard=8,
            weights="0" * 32,
            dtype="float32",
            versions={"torch": "2"},
        )
        (self.folder / "manifest.json").write_bytes(damaged(job.to_json(), draw, where, value))

        def read() -> None:
            assert Job.load(self.folder) == job

        self.attempt("manifest", read)


def toml(doc: Any) -> str:
    """Plain data as TOML, as far as it has it; the rest is damage."""
    if not isinstance(doc, dict):
        return str(doc)
    tables = {k: v for k, v in doc.items() if isinstance(v, dict)}
    lines = [f"{k} = {json.dumps(v)}" for k, v in doc.items() if k not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
    return "\n".join(lines)


def pictures() -> Any:
    """Small pictures of every format, encoded."""
    draw = np.random.default_rng(0)
    rgb = Image.fromarray(draw.integers(0, 255, (9, 7, 3), dtype=np.uint8))
    grey = Image.fromarray(draw.integers(0, 255, (9, 7), dtype=np.uint8))
    for suffix, name, picture in (
        (".png", "PNG", rgb),
        (".png", "PNG", rgb.convert("P")),
        (".png", "PNG", rgb.convert("RGBA")),
        (".jpg", "JPEG", rgb),
        (".gif", "GIF", rgb.convert("P")),
        (".bmp", "BMP", rgb),
        (".tif", "TIFF", grey),
        (".webp", "WEBP", rgb),
        (".ppm", "PPM", rgb),
        (".jp2", "JPEG2000", rgb),
        (".avif", "AVIF", rgb),
    ):
        stream = io.BytesIO()
        picture.save(stream, name)
        yield suffix, stream.getvalue()


def every(count: int, attempt: Any) -> None:
    """`attempt` with `count` different draws, always the same ones."""

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.integers(0, 2**32), st.integers(0, 999), values)
    def run(seed: int, where: int, value: Any) -> None:
        attempt(random.Random(seed), where, value)

    run()


def main() -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # says where it hangs, then the process ends
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        fuzz = Fuzz(Path(folder))
        kinds: dict[str, Any] = {
            "config": fuzz.config,
            "weights": fuzz.weights,
            "public": fuzz.foreign,
            "plan": fuzz.plans,
            "recipe": fuzz.recipe,
            "picture": fuzz.picture,
            "npz": fuzz.arrays,
            "state": fuzz.state,
            "manifest": fuzz.manifest,
        }
        for attempt in (*kinds.values(), *kinds.values()):  # imports at the first use are no cost of ours
            attempt(random.Random(0), 0, 0)
        fuzz.seen.clear()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
        for kind, attempt in kinds.items():
            every(COUNTS[kind], attempt)
    print(json.dumps(fuzz.seen))


if __name__ == "__main__":
    main()
