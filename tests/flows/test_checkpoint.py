"""Checkpoints: the same flow comes back, a broken one is refused, a save that fails breaks nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

import jacobiflow as jf
from jacobiflow.core.files import write_atomically
from jacobiflow.flows import checkpoint
from jacobiflow.flows.checkpoint import CARD, CONFIG, WEIGHTS, CheckpointError
from jacobiflow.flows.families import find_family
from subjects import MAKERS, NAMES, maf, subject, tarflow


def tiny_tarflow(seed: int = 0, **options: Any) -> jf.Flow:
    shape = {"image_size": 4, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1, "num_classes": 3}
    return tarflow(0.2, seed, **(shape | options)).eval()


def tiny_maf(seed: int = 0, **options: Any) -> jf.Flow:
    return maf(1.0, seed, **({"features": 5, "blocks": 2, "hidden": (8, 6)} | options)).eval()


def same(one: jf.Flow, two: jf.Flow) -> bool:
    """Same family, config and weights to the last bit."""
    a, b = one.state_dict(), two.state_dict()
    return (
        type(one) is type(two)
        and one.config == two.config
        and a.keys() == b.keys()
        and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
    )


def refused(source: Any, *words: str, **options: Any) -> str:
    """`jf.load` refuses in one line that holds these words; returns the line."""
    with pytest.raises(CheckpointError) as caught:
        jf.load(source, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    for word in words:
        assert word in text
    return text


def edit(folder: Path, **changes: Any) -> None:
    """Change fields of the config in `folder`; None takes a field out."""
    doc = json.loads((folder / CONFIG).read_text())
    doc["config"] = {k: v for k, v in (doc["config"] | changes).items() if v is not None}
    (folder / CONFIG).write_text(json.dumps(doc))


# Round trips

EXTRA = {
    "orders": lambda: maf(1.1, order=tuple(tuple((i * s) % 19 for i in range(19)) for s in (2, 3, 5))),
    "spline, context, orders": lambda: maf(
        0.4, features=3, context=2, transform="spline", blocks=2, order=((2, 0, 1), (0, 1, 2))
    ),
    "one feature": lambda: maf(0.4, features=1, hidden=(4,)),
}
UNREGISTERED = "tarflow-rotary"
FLOWS: dict[str, Callable[[], jf.Flow]] = {n: lambda n=n: MAKERS[n]().flow for n in NAMES} | EXTRA
del FLOWS[UNREGISTERED]


def test_a_flow_that_would_load_as_another_one_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="RotaryFlow would load as another family's flow: give it a name"):
        MAKERS[UNREGISTERED]().flow.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FLOWS)
def test_the_same_flow_comes_back(name: str, tmp_path: Path) -> None:
    flow = FLOWS[name]()
    flow.save(tmp_path / "deep" / "model")
    again = jf.load(tmp_path / "deep" / "model")
    assert same(again, flow)
    assert not again.training
    assert again.revision is None
    condition = {}
    if flow.context_features:
        condition["context"] = torch.linspace(-1, 1, 3 * flow.context_features).view(3, -1)
    ours, theirs = (f.sample(3, seed=1, **condition) for f in (flow, again))
    assert torch.equal(ours.x, theirs.x)
    assert torch.equal(ours.log_det, theirs.log_det)


def test_a_learned_variance_comes_back(tmp_path: Path) -> None:
    flow = tiny_tarflow(volume_preserving=True)
    assert not torch.equal(flow.var, torch.ones_like(flow.var))
    flow.save(tmp_path)
    assert torch.equal(jf.load(tmp_path).var, flow.var)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_knows_every_tensor(name: str) -> None:
    flow = subject(name).flow
    shapes = list(flow.config.shapes())
    assert len(shapes) == len(dict(shapes))
    assert dict(shapes) == {k: tuple(v.shape) for k, v in flow.state_dict().items()}


def test_double_precision_is_kept(tmp_path: Path) -> None:
    flow = tiny_maf().double()
    with torch.no_grad():
        for p in flow.parameters():
            p += 1e-12 * torch.randn_like(p)
    flow.save(tmp_path)
    assert same(jf.load(tmp_path, dtype=torch.float64), flow)
    assert {p.dtype for p in jf.load(tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16")])
@pytest.mark.parametrize("make", [tiny_tarflow, tiny_maf])
def test_weights_can_be_stored_in_half(make: Any, dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    flow = make()
    flow.save(tmp_path, dtype=dtype)
    with safe_open(tmp_path / WEIGHTS, framework="pt") as f:
        assert {f.get_slice(name).get_dtype() for name in f.keys()} == {kind}  # noqa: SIM118
    again = jf.load(tmp_path)
    for name, value in flow.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.to(dtype).float())
    assert same(flow, make())  # saving changed nothing


def test_numbers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    old, flow = tiny_maf(1), tiny_maf()
    old.save(tmp_path)
    with torch.no_grad():
        flow.blocks[1].head.bias[0] = 1e6
    with pytest.raises(CheckpointError, match=r"'blocks\.1\.head\.bias' has values too large for torch.float16"):
        flow.save(tmp_path, dtype=torch.float16)
    assert same(jf.load(tmp_path), old)
    flow.save(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"stored as float64.*, not torch.int8"):
        flow.save(tmp_path, dtype=torch.int8)


def test_loading_leaves_the_random_state(tmp_path: Path) -> None:
    tiny_tarflow().save(tmp_path)
    state = torch.get_rng_state()
    jf.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


# What is written


def test_the_folder_holds_three_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for where, name in ((pickle, "dumps"), (pickle, "loads"), (torch, "save"), (torch, "load")):
        monkeypatch.setattr(where, name, never)
    flow = tiny_maf(order=((4, 3, 2, 1, 0), (0, 1, 2, 3, 4)))
    flow.save(tmp_path)
    jf.load(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {CONFIG, WEIGHTS, CARD}
    doc = json.loads((tmp_path / CONFIG).read_text())
    assert {k: doc[k] for k in ("format", "version", "family")} == {
        "format": "jacobiflow",
        "version": 1,
        "family": "maf",
    }
    assert doc.keys() == {"format", "version", "family", "config"}
    assert doc["config"]["hidden"] == [8, 6]
    assert doc["config"]["order"] == [[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]]
    assert load_file(tmp_path / WEIGHTS).keys() == flow.state_dict().keys()


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.touch()
    tiny_maf().save(tmp_path / "model")
    modes = {p.stat().st_mode for p in (tmp_path / "model").iterdir()}
    assert modes == {plain.stat().st_mode}


def test_the_same_flow_makes_the_same_files(tmp_path: Path) -> None:
    for name in "ab":
        tiny_tarflow().save(tmp_path / name)
    for name in (CONFIG, WEIGHTS, CARD):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_card_is_written_and_a_given_one_is_kept(tmp_path: Path) -> None:
    flow, card = tiny_maf(), tmp_path / CARD
    flow.save(tmp_path)
    count = sum(p.numel() for p in flow.parameters())
    assert f"{count:,} parameters" in card.read_text()
    assert "| features | 5 |" in card.read_text()
    flow.save(tmp_path, card="# Mine\n")
    assert card.read_text() == "# Mine\n"
    tiny_maf(seed=3).save(tmp_path)  # further training
    assert card.read_text() == "# Mine\n"
    card.unlink()
    flow.save(tmp_path)
    tiny_maf(hidden=(4,)).save(tmp_path)  # another model
    assert "| hidden | (4,) |" in card.read_text()
    edited = card.read_text().replace("parameters", "numbers")
    card.write_text(edited)
    flow.save(tmp_path)
    assert card.read_text() == edited


def test_a_readme_of_the_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / CARD).write_bytes(b"# My project\xff")
    tiny_maf().save(tmp_path)
    assert (tmp_path / CARD).read_bytes() == b"# My project\xff"
    assert same(jf.load(tmp_path), tiny_maf())


FOREIGN = {
    CONFIG: b'{"model_type": "gpt2"}',
    "profile.json": b"{}",
    "guess.safetensors": b"mine",
    WEIGHTS: save({"x": torch.zeros(3)}, metadata={"format": "pt"}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_of_others_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(FOREIGN[name])
    with pytest.raises(CheckpointError, match=f"has a {name} that is not a jacobiflow checkpoint's: save to another"):
        tiny_maf().save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {name: FOREIGN[name]}


def test_a_card_stays_short_whatever_the_config(tmp_path: Path) -> None:
    tiny_maf(features=200, order=(tuple(range(200)),) * 2).save(tmp_path)
    assert max(map(len, (tmp_path / CARD).read_text().splitlines())) < 200


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"cannot write .*file") as caught:
            tiny_maf().save(folder)
        assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_text() == "mine"


# Saves that are cut short


class Crash(BaseException):
    """The end of the process."""


# Same shapes, other function: a mixture of the two would load without complaint.
OLD, NEW = (lambda: tiny_maf(1, activation="relu")), (lambda: tiny_maf(2, activation="tanh"))


def cut_at(monkeypatch: pytest.MonkeyPatch, step: int, how: BaseException) -> None:
    """Let the step-th file be written but never be moved to its place."""
    replace, calls = os.replace, iter(range(1, 100))

    def stop(source: Any, target: Any) -> None:
        if next(calls) >= step:
            raise how
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop)


@pytest.mark.parametrize("how", [Crash(), OSError(errno.ENOSPC, "No space left on device")], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_save_cut_short_leaves_the_old_or_the_new(
    step: int, how: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    OLD().save(tmp_path)
    with monkeypatch.context() as patch:
        cut_at(patch, step, how)
        with pytest.raises((Crash, CheckpointError)):
            NEW().save(tmp_path)
    assert same(jf.load(tmp_path), OLD() if step < 3 else NEW())
    assert {p.name for p in tmp_path.iterdir()} == {CONFIG, WEIGHTS, CARD}

    with monkeypatch.context() as patch:  # and once more, from whatever that left
        cut_at(patch, 2, Crash())
        with pytest.raises(Crash):
            tiny_maf(3, activation="elu").save(tmp_path)
    assert same(jf.load(tmp_path), OLD() if step < 3 else NEW())
    last = tiny_tarflow()
    last.save(tmp_path)
    assert same(jf.load(tmp_path), last)
    assert "previous" not in json.loads((tmp_path / CONFIG).read_text())


def test_weights_of_other_tools_survive_a_save_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = OLD()
    old.save(tmp_path)
    save_file(old.state_dict(), tmp_path / WEIGHTS)  # without our header
    cut_at(monkeypatch, 2, Crash())
    with pytest.raises(Crash):
        NEW().save(tmp_path)
    assert same(jf.load(tmp_path), old)


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(tensors: Any, path: str, **_: Any) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    OLD().save(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", half)
    with pytest.raises(CheckpointError, match="No space left on device"):
        NEW().save(tmp_path)
    assert same(jf.load(tmp_path), OLD())
    assert {p.name for p in tmp_path.iterdir()} == {CONFIG, WEIGHTS, CARD}


def test_a_first_save_cut_short_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        cut_at(patch, 2, Crash())
        with pytest.raises(Crash):
            NEW().save(tmp_path)
    refused(tmp_path, "has no config.json")
    NEW().save(tmp_path)
    assert same(jf.load(tmp_path), NEW())


def test_atomic_writing_replaces_a_link_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("shared")
    (tmp_path / "link").symlink_to("blob")
    write_atomically(tmp_path / "link", lambda name: Path(name).write_text("new"))
    assert (tmp_path / "blob").read_text() == "shared"
    assert (tmp_path / "link").read_text() == "new"


# Claims that are not true


@pytest.fixture
def no_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow that gets built is a failure: nothing may be allocated for a false config."""

    class Unbuilt:
        def __init__(self, name: str) -> None:
            self.config_type = find_family(name).config_type

        def __call__(self, config: Any) -> None:
            raise AssertionError("a flow was built")

    monkeypatch.setattr(checkpoint, "find_family", Unbuilt)


BILLIONS = 4 * 10**9
CLAIMS: list[Any] = [
    *(("tarflow", {name: BILLIONS}) for name in ("image_size", "image_channels", "width", "blocks")),
    *(("tarflow", {name: BILLIONS}) for name in ("layers_per_block", "num_classes")),
    ("tarflow", {"image_size": BILLIONS, "patch_size": BILLIONS}),
    ("tarflow", {"image_size": 10**4000}),
    *(("maf", {name: BILLIONS}) for name in ("features", "context", "blocks")),
    ("maf", {"hidden": [BILLIONS]}),
    ("maf", {"hidden": [8, 6] * 10_000}),
    ("maf", {"hidden": [8, BILLIONS], "order": "random"}),
    ("maf", {"features": BILLIONS, "order": "random"}),
    ("maf", {"transform": "spline", "bins": BILLIONS}),
    ("maf", {"features": 10**4000}),
    ("maf", {"features": 4 * 10**9, "blocks": 1, "order": [[0]]}),
]


@pytest.mark.parametrize(("family", "claim"), CLAIMS, ids=lambda c: str(c)[:40])
@pytest.mark.usefixtures("no_flows")
def test_false_sizes_are_refused_fast_and_without_memory(family: str, claim: dict[str, Any], tmp_path: Path) -> None:
    (tiny_tarflow if family == "tarflow" else tiny_maf)().save(tmp_path)
    edit(tmp_path, **claim)
    text = len((tmp_path / CONFIG).read_text())
    tracemalloc.start()
    began = time.process_time()
    try:
        refused(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2e6 + 100 * text
    assert time.process_time() - began < 2


@pytest.mark.parametrize("make", [tiny_tarflow, tiny_maf])
@pytest.mark.usefixtures("no_flows")
def test_tensors_must_be_those_of_the_config(make: Any, tmp_path: Path) -> None:
    flow = make()
    flow.save(tmp_path)
    whole = load_file(tmp_path / WEIGHTS)
    for name, value in whole.items():
        for other, words in {
            "missing": "is missing",
            "shape": f"is {[*value.shape[:-1], value.shape[-1] + 1]} of F32, its config says {list(value.shape)} ",
            "rank": f"is {[1, *value.shape]} of F32, its config says",
            "integers": f"is {list(value.shape)} of I32, its config says {list(value.shape)} of floats",
        }.items():
            tensors = {k: v for k, v in whole.items() if k != name}
            if other == "shape":
                tensors[name] = torch.zeros(*value.shape[:-1], value.shape[-1] + 1)
            elif other == "rank":
                tensors[name] = value[None]
            elif other == "integers":
                tensors[name] = value.int()
            save_file(tensors, tmp_path / WEIGHTS)
            refused(tmp_path, f"tensor {name!r} {words}")
    save_file(whole | {"blocks.9.extra": torch.zeros(1)}, tmp_path / WEIGHTS)
    refused(tmp_path, "tensor 'blocks.9.extra' is not part of this model")


def test_tensors_of_other_tools_are_welcome(tmp_path: Path) -> None:
    flow, other = tiny_maf(1), tiny_maf(2)
    flow.save(tmp_path)
    save_file(other.state_dict(), tmp_path / WEIGHTS)
    assert same(jf.load(tmp_path), other)
    edit(tmp_path, activation="tanh")
    assert jf.load(tmp_path).config.activation == "tanh"


# Damage


def survives(folder: Path, flow: jf.Flow) -> bool:
    """Whether what is in `folder` loads; if it does, every weight is right."""
    again, said = None, ""
    try:
        again = jf.load(folder)
    except CheckpointError as error:
        said = str(error)
    assert "\n" not in said
    if again is None:
        return False
    assert all(torch.equal(again.state_dict()[k], v) for k, v in flow.state_dict().items())
    doc = json.loads((folder / CONFIG).read_text())["config"]
    assert json.loads(json.dumps(again.config.__dict__)) == again_defaults(type(again.config), doc)
    return True


def again_defaults(kind: Any, doc: dict[str, Any]) -> dict[str, Any]:
    """A config's document with what it leaves out."""
    return json.loads(json.dumps(kind(**doc).__dict__))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [tiny_tarflow, tiny_maf])
@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_damaged_files_are_refused_or_harmless(make: Any, name: str, tmp_path: Path) -> None:
    flow = make(blocks=1)
    flow.save(tmp_path)
    whole = (tmp_path / name).read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        (tmp_path / name).write_bytes(whole[: draw.randrange(len(whole) - 1)])
        assert not survives(tmp_path, flow)
    head = int.from_bytes(whole[:8], "little") + 8 if name == WEIGHTS else len(whole)
    for i in range(300):
        data = bytearray(whole)
        at = draw.randrange(head if i % 3 else len(whole))
        data[at] = draw.randrange(256) if i % 2 else data[at] ^ (1 << draw.randrange(8))
        (tmp_path / name).write_bytes(data)
        survives(tmp_path, flow)
    (tmp_path / name).write_bytes(whole)
    assert survives(tmp_path, flow)


def test_every_byte_of_the_weights_counts(tmp_path: Path) -> None:
    flow = tiny_maf(blocks=1, hidden=(2,))
    flow.save(tmp_path)
    whole = (tmp_path / WEIGHTS).read_bytes()
    head = int.from_bytes(whole[:8], "little") + 8
    for at in range(head, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1
        (tmp_path / WEIGHTS).write_bytes(data)
        refused(tmp_path, "model.safetensors is damaged: its numbers are not those that were saved")


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 64, b"{}", b"[]", b"null"])
def test_other_files_are_no_checkpoints(name: str, content: bytes, tmp_path: Path) -> None:
    tiny_maf().save(tmp_path)
    (tmp_path / name).write_bytes(content)
    refused(tmp_path, name)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_missing_files_and_folders_in_their_place(name: str, tmp_path: Path) -> None:
    tiny_maf().save(tmp_path)
    (tmp_path / name).unlink()
    refused(tmp_path, f"has no {name}: it is not a checkpoint")
    (tmp_path / name).mkdir()
    refused(tmp_path, name)


HEAD = '{"format": "jacobiflow", "version": 1, "family": "maf", '
DEEP = "[" * 900 + "]" * 900


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + '"config": {"features": 5, "min_scale": NaN}}', "NaN"),
        (HEAD + '"config": {"features": 5, "bound": Infinity}}', "Infinity"),
        (HEAD + '"config": {"features": 5, "bound": -Infinity}}', "Infinity"),
        (HEAD + '"config": {"features": 5, "bound": 1e999}}', "bound"),
        (HEAD + f'"config": {{"features": 5, "bound": 1{"0" * 400}}}}}', "config.bound must be float, not 1000"),
        (HEAD + f'"config": {{"features": 1{"0" * 5000}}}}}', "cannot read"),
        (HEAD + '"config": {"features": 5, "features": 6}}', "the key 'features' is there twice"),
        (HEAD + '"family": "tarflow", "config": {"features": 5}}', "the key 'family' is there twice"),
        (HEAD + '"config": ' + "[" * 100_000, "nested too deeply"),
        (HEAD + f'"config": {DEEP}}}', "config must be a table"),
        (HEAD + f'"config": {{"features": {DEEP}}}}}', "config.features must be int, not [[[[[["),
        (HEAD + f'"config": {{"features": 5, "order": {DEEP}}}}}', "config.order must be"),
        (HEAD + '"config": {"features": "5"}}', "config.features must be int, not '5'"),
        (HEAD + '"config": {"features": true}}', "config.features must be int, not True"),
        (HEAD + '"config": {"features": 5.0}}', "config.features must be int, not 5.0"),
        (HEAD + '"config": {"features": null}}', "config.features must be int, not None"),
        (HEAD + '"config": {}}', "'features'"),
        (HEAD + '"config": {"features": 0}}', "features must be 1 or more, not 0"),
        (HEAD + '"config": {"features": 5, "hidden": []}}', "hidden needs widths"),
        (HEAD + '"config": {"features": 5, "hidden": [4, "x"]}}', "config.hidden[1] must be int, not 'x'"),
        (HEAD + '"config": {"features": 5, "hidden": 4}}', "config.hidden must be a list of int, not 4"),
        (HEAD + '"config": {"features": 5, "depth": 4}}', "config has no field 'depth'"),
        (HEAD + f'"config": {{"features": 5, "{"x" * 9999}": 4}}}}', "config has no field 'xxx"),
        (
            HEAD + '"config": {"features": 5, "order": "sorted"}}',
            "'random' or 'same' or a list",
        ),
        (HEAD + '"config": {"features": 5, "blocks": 1, "order": [[0, 1]]}}', "one permutation"),
        (HEAD + '"config": 5}', "config must be a table"),
        (HEAD[:-2] + "}", "config must be a table"),
        ('{"format": "jacobiflow", "version": 1, "family": "../maf"}', "family must be one of tarflow, maf"),
        ('{"format": "jacobiflow", "version": 1, "family": ["maf"]}', "family must be one of"),
        ('{"format": "jacobiflow", "version": 2}', "this release reads version 1, not 2"),
        ('{"format": "jacobiflow"}', "this release reads version 1, not None"),
        ('{"format": "other"}', "not a jacobiflow config"),
        ('"jacobiflow"', "not a jacobiflow config"),
        ("{" * 10, "not JSON"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_wrong_configs_are_named(text: str, words: str, tmp_path: Path) -> None:
    tiny_maf().save(tmp_path)
    (tmp_path / CONFIG).write_text(text, encoding="utf-8")
    refused(tmp_path, words)


def test_a_config_that_no_flow_can_be_built_of(tmp_path: Path) -> None:
    tiny_maf(order="random").save(tmp_path)
    edit(tmp_path, order_seed=10**30)
    refused(tmp_path, CONFIG)


def test_extra_fields_outside_the_config_lead_nowhere(tmp_path: Path) -> None:
    flow = tiny_maf()
    flow.save(tmp_path / "a")
    tiny_maf(2).save(tmp_path / "b")
    doc = json.loads((tmp_path / "a" / CONFIG).read_text())
    doc |= {"weights": "../b/model.safetensors", "auto_map": {"AutoModel": "evil.py"}, "previous": "../b"}
    (tmp_path / "a" / CONFIG).write_text(json.dumps(doc))
    assert same(jf.load(tmp_path / "a"), flow)


# Where a flow is found


def test_folders_as_text_and_as_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = tiny_maf()
    flow.save(str(tmp_path / "runs" / "model"))
    monkeypatch.chdir(tmp_path)
    for source in (tmp_path / "runs/model", "runs/model", "./runs/model", "runs/model/", Path("runs/model")):
        assert same(jf.load(source), flow)
    refused("runs/model", "revision belongs to hub ids", revision="main")


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_maf().save("model")
    refused("model/config.json", "is a file; a checkpoint is a folder with config.json and model.safetensors")
    refused(tmp_path / "model" / WEIGHTS, "is a file")
    for source in ("nothing", "../model", "a/b/c", "/no/model", "~/model", "runs/", Path("user/model")):
        refused(source, "no model", "a bundled name", "a checkpoint folder or a hub id")
    refused("x" * 5000, "no model", "a checkpoint folder or a hub id")
    (tmp_path / "empty").mkdir()
    refused("empty", "empty has no config.json: it is not a checkpoint")
    Path("empty/state.safetensors").touch()
    refused("empty", "empty has not finished, and its state cannot be read", "rerun its command to finish it")
    Path("empty/state.safetensors").unlink()
    Path("empty/log.jsonl").touch()
    refused("empty", "empty is a training that has saved nothing yet: wait for its first state")


def test_a_recipe_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "bundled_names", lambda: ["mnist"])
    train = "train it, `jacobiflow train cifar10 --out runs/cifar10`, and load runs/cifar10"
    refused("cifar10", f"cifar10 is a recipe, not a bundled model: {train}")


def test_bundled_names_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = tiny_maf()
    flow.save(tmp_path / "package" / "toy")
    (tmp_path / "package" / "notes").mkdir()
    monkeypatch.setattr(checkpoint, "files", lambda name: tmp_path / "package")
    monkeypatch.chdir(tmp_path)
    assert checkpoint.bundled_names() == ["toy"]
    assert same(jf.load("toy"), flow)
    tiny_maf(2).save("toy")
    assert same(jf.load("toy"), flow)
    assert same(jf.load("./toy"), tiny_maf(2))
    refused("other", "a bundled name (toy)")
    refused("../package/toy", "no model")


def test_without_the_bundle_the_error_names_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MODELS", "jacobiflow_models_that_are_not_installed")
    assert checkpoint.bundled_names() == []
    refused("mnist", "no model 'mnist'", "pip install ./models in the checkout")


def test_every_bundled_model_loads() -> None:
    for name in checkpoint.bundled_names():
        flow = jf.load(name)
        assert flow.sample(1, seed=0).x.isfinite().all()
