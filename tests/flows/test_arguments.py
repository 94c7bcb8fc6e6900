"""Arguments of the library that make no sense: one line of the project's own, whatever was given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from subjects import lattice, maf, tarflow


@pytest.fixture(scope="module")
def flow() -> jf.Flow:
    return tarflow(0.2, num_classes=3)


@pytest.fixture(scope="module")
def vector() -> jf.Flow:
    return maf(1.0, context=2)


WRONG: dict[str, tuple[str, Any]] = {
    "n that is a float": ("n must be a whole number, not 2.5", lambda f: f.sample(2.5)),
    "n that is a word": ("n must be a whole number, not '3'", lambda f: f.sample("3")),
    "n that is true": ("n must be a whole number, not True", lambda f: f.sample(True)),
    "no n": ("n must be a whole number, not None", lambda f: f.sample(None)),
    "n below 0": ("n must be 0 or more, not -1", lambda f: f.sample(-1)),
    "a start between samples": ("start must be a whole", lambda f: f.noise(1, 0, start=0.5)),
    "a seed below 0": ("seed must be 0 or more, not -1", lambda f: f.sample(1, seed=-1)),
    "a seed that is a word": ("seed must be a whole number", lambda f: f.sample(1, seed="a")),
    "labels that are words": ("'cat': flow.class_names.index gives", lambda f: f.sample(1, labels="cat")),
    "labels of an object": ("labels must be a whole number", lambda f: f.sample(1, labels=object())),
    "labels of a table": ("labels must be a whole number", lambda f: f.sample(1, labels={})),
    "complex labels": ("labels must be a whole", lambda f: f.sample(1, labels=torch.tensor([1j]))),
    "labels of floats": ("labels must be a whole", lambda f: f.sample(1, labels=torch.zeros(1))),
    "a label of 10^30": ("labels must be a whole number", lambda f: f.sample(1, labels=10**30)),
    "no plan": ("a plan is a name, a jf.Plan or a path", lambda f: f.sample(1, plan=3)),
    "a plan that is a number": ("a plan is a name, a jf.Plan or a path", lambda f: f.sample(1, plan=3)),
    "a plan with a name of 10,000": ("no plan is called 'aaaa", lambda f: f.sample(1, plan="a" * 10_000)),
    "a tol that is none": ("tol must be finite", lambda f: f.sample(1, tol=math.nan)),
    "a tol of 10^400": ("tol must be finite", lambda f: f.sample(1, tol=10**400)),
    "a plan of numpy": ("a plan is a name, a jf.Plan or a path", lambda f: f.sample(1, plan=np.zeros(2))),
    "a plan in a list": ("a plan is a name, a jf.Plan or a path", lambda f: f.decode(f.noise(1), [jf.Method()])),
    "an init of numpy": ("init must be one of zeros", lambda f: f.sample(1, init=np.zeros(2))),
    "a mistyped init": ("init must be one of zeros, noise, previous", lambda f: f.sample(1, init="zero")),
    "a bound of 0": ("max_deviation must be positive, not 0", lambda f: f.sample(1, max_deviation=0)),
    "a bound of 10^400": ("max_deviation must be positive", lambda f: f.sample(1, max_deviation=10**400)),
    "a bound that is a word": ("max_deviation must be positive, not 'low'", lambda f: f.plan(max_deviation="low")),
    "a batch of none": ("batch_size must be 1 or more, not 0", lambda f: f.sample(1, batch_size=0)),
    "half a batch": ("batch_size must be a whole number", lambda f: f.sample(1, batch_size=0.5, progress=True)),
    "a generator of numpy": ("generator takes a Generator", lambda f: f.sample(1, generator=np.random.default_rng())),
    "a generator that is a seed": ("generator takes a Generator, not int", lambda f: f.noise(1, generator=3)),
    "backends in a list": (
        r"backend must be one of torch, c, compile, not \['c'",
        lambda f: f.sample(1, backend=["c"]),
    ),
    "no failure": ("on_failure must be one of fallback, raise", lambda f: f.sample(1, on_failure=np.zeros(2))),
    "a watcher that is a word": ("watch must be a function, not 'me'", lambda f: f.decode(f.noise(1), watch="me")),
    "denoise by a word": ("denoise must be True or False, not 'no'", lambda f: f.sample(1, denoise="no")),
    "check by a number": ("check must be True or False, not 0.5", lambda f: f.sample(1, check=0.5)),
    "progress of numpy": ("progress must be True or False", lambda f: f.sample(1, progress=np.zeros(2))),
    "no cache": ("cache must be True or False, not None", lambda f: f.decode(f.noise(1), cache=None)),
    "no gradient": ("differentiable must be", lambda f: f.decode(f.noise(1), differentiable=None)),
    "no warning": ("warn must be True or False, not 'never'", lambda f: f.decode(f.noise(1), warn="never")),
    "guidance of 10^400": ("Guidance.weight must be finite", lambda f: f.sample(1, guidance=10**400)),
    "guidance for no plan": ("Guidance.weight must be finite", lambda f: f.plan(guidance="x")),
    "guidance by a word": ("Guidance.weight must be finite", lambda f: f.sample(1, guidance="x")),
    "no guidance": ("Guidance.weight must be finite", lambda f: f.sample(1, guidance=None)),
    "noise of numpy": ("z must be a torch tensor", lambda f: f.decode(f.noise(1).numpy())),
    "noise in a list": ("z must be a torch tensor, not list", lambda f: f.decode([[1.0]])),
    "noise of whole numbers": ("floats, not int64", lambda f: f.decode(f.noise(1).long())),
    "noise of truths": ("floats, not bool", lambda f: f.decode(f.noise(1) > 0)),
    "complex noise": ("floats, not complex64", lambda f: f.decode(f.noise(1).to(torch.complex64))),
    "sparse noise": ("floats, not sparse_coo", lambda f: f.decode(f.noise(1).to_sparse())),
    "noise elsewhere": ("z is on meta, the flow on cpu", lambda f: f.decode(f.noise(1).to("meta"))),
    "noise without rows": (r"z must be \[N, ", lambda f: f.decode(torch.zeros(()))),
    "data of numpy": ("x must be a torch tensor", lambda f: f.encode(np.zeros((1, *f.data_shape)))),
    "no data": ("x must be a torch tensor, not NoneType", lambda f: f.log_prob(None)),
    "pixels as they are": (
        "floats, not uint8",
        lambda f: f.log_prob(torch.zeros(1, *f.data_shape, dtype=torch.uint8)),
    ),
    "pixels to denoise": ("floats, not int64", lambda f: f.denoise(torch.zeros(1, *f.data_shape).long())),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_flow_refuses(flow: jf.Flow, kind: str) -> None:
    words, call = WRONG[kind]
    with pytest.raises(ValueError, match=words) as caught:
        call(flow)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "context", [None, [0.0, 1.0], np.zeros(2), "a", torch.zeros(3), torch.zeros(2) + 1j, torch.zeros(2).bool]
)
def test_context_that_is_none(vector: jf.Flow, context: Any) -> None:
    with pytest.raises(ValueError, match=r"context of shape \[1, 2\]|context must be real"):
        vector.sample(1, context=context)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (jf.TarFlowConfig, {"image_size": "8"}, "image_size must be a whole number, not '8'"),
        (jf.TarFlowConfig, {"image_size": 8.0}, "image_size must be a whole number, not 8.0"),
        (jf.TarFlowConfig, {"image_size": True}, "image_size must be a whole number, not True"),
        (jf.TarFlowConfig, {"image_size": 8, "num_classes": -1}, "num_classes must be 0 or more"),
        (jf.TarFlowConfig, {"image_size": 8, "noise_std": "x"}, "noise_std must be finite"),
        (jf.TarFlowConfig, {"image_size": 8, "noise_std": -1}, "noise_std must be finite and not negative"),
        (jf.MAFConfig, {"features": None}, "features must be a whole number, not None"),
        (jf.MAFConfig, {"features": 3, "hidden": 5}, "hidden needs widths"),
        (jf.MAFConfig, {"features": 3, "hidden": (0.5,)}, "hidden must be a whole number"),
        (jf.MAFConfig, {"features": 3, "order": None}, "order must be a word or orders"),
        (jf.MAFConfig, {"features": 3, "bound": math.nan}, "bound must be finite"),
        (jf.TarFlowConfig, {"image_size": 8, "volume_preserving": "no"}, "must be True or False, not 'no'"),
        (jf.MAFConfig, {"features": 3, "residual": None}, "residual must be True or False, not None"),
        (jf.MAFConfig, {"features": 3, "hidden": {8}}, "hidden needs widths"),
        (jf.MAFConfig, {"features": 3, "scale": np.zeros(2)}, "scale must be one of softplus, sigmoid, exp"),
        (jf.MAFConfig, {"features": 3, "order_seed": 2**63}, "order_seed must be 9,223,372,036,854,775,807 or less"),
        (jf.TarFlowConfig, {"image_size": 8, "num_classes": 3, "class_names": "abc"}, "3 different names, not 'abc'"),
        (jf.TarFlowConfig, {"image_size": 8, "num_classes": 2, "class_names": (1, 2)}, "2 different names"),
        (jf.TarFlowConfig, {"image_size": 8, "num_classes": 2, "class_names": ("a",)}, "2 different names"),
        (jf.Guidance, {"annealed": "yes"}, "annealed must be True or False, not 'yes'"),
        (jf.Guidance, {"what": ["a"]}, r"what must be one of a, b, ab, not \['a'\]"),
        (jf.Method, {"width": 2.0}, "width must be a whole number, not 2.0"),
        (jf.Method, {"width": 0}, "width must be 1 or more, not 0"),
        (jf.Method, {"max_sweeps": "9"}, "max_sweeps must be a whole number, not '9'"),
        (jf.Method, {"tol": None}, "tol must be finite, not None"),
        (jf.Method, {"tol": 10**400}, "tol must be finite"),
        (jf.Method, {"init": np.zeros(2)}, "init must be one of zeros"),
        (jf.Plan, {"methods": None}, "Plan takes a tuple of jf.Method, one per block, not None"),
        (jf.Plan, {"methods": "auto"}, "Plan takes a tuple of jf.Method, one per block, not 'auto'"),
        (jf.Plan.sequential, {"blocks": "3"}, "blocks must be a whole number"),
        (jf.Plan.selective, {"blocks": None, "tol": 0.1}, "blocks must be a whole number"),
        (jf.Plan.from_json, {"text": {}}, "a plan must be JSON"),
        (jf.Plan.load, {"path": 3}, "cannot read the plan 3"),
        (jf.Guidance, {"weight": "1"}, "weight must be finite"),
        (jf.Guidance, {"weight": 1e300}, "weight must be within"),
        (jf.Guidance, {"attn_temp": 1e-300}, "attn_temp must be from 1e-06 to 1e"),
        (jf.Guidance, {"attn_temp": 0}, r"attn_temp must be from 1e-06 to 1e\+06, not 0"),
    ],
)
def test_configs(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)


def test_numbers_of_numpy_are_numbers(flow: jf.Flow, tmp_path: Path) -> None:
    assert len(flow.sample(np.int64(2), seed=np.uint8(3), labels=np.array([0, 1])).x) == 2
    jf.MAF(jf.MAFConfig(features=np.int64(3), hidden=np.array([4]))).save(tmp_path)
    assert jf.load(tmp_path).config.hidden == (4,)
    method = jf.Method(width=np.int64(2), tol=np.float32(0.5), max_sweeps=np.int32(3))
    assert jf.Plan.from_json(jf.Plan((method,)).to_json())[0] == method
    assert flow.sample(np.int64(3), batch_size=np.int64(2), max_deviation=np.float64(0.1), seed=2**70).x.shape[0] == 3


@pytest.mark.parametrize("numbers", [np.float32, np.float64, float, torch.tensor])
@pytest.mark.parametrize("family", ["tarflow", "maf", "lattice"])
def test_numbers_of_any_kind_are_stored(family: str, numbers: Any, tmp_path: Path) -> None:
    yes = np.bool_(True)
    if family == "tarflow":
        flow = tarflow(0.0, volume_preserving=yes, noise_std=numbers(0.5))
    else:
        some: Any = {"features": 9, "hidden": (4,), "blocks": 2, "bound": numbers(3), "order_seed": np.int64(3)}
        own: Any = {"residual": yes, "order": [torch.arange(9), np.arange(9)]}
        flow = maf(0.0, **some, **own) if family == "maf" else lattice(0.0, **some, order="random", linear=yes)
    flow.save(tmp_path)
    again = jf.load(tmp_path)
    assert again.config == flow.config
    assert again.fingerprint() == flow.fingerprint()


def test_options_of_any_kind(flow: jf.Flow, tmp_path: Path) -> None:
    guide = jf.Guidance(np.float32(0.5), annealed=np.bool_(True), attn_temp=torch.tensor(2.0))
    jf.tune(flow, 2, np.float32(0.1), labels=1, guidance=guide).save(tmp_path / "plan.json")
    flow.save(tmp_path / "model")  # with a profile of this guidance
    assert flow.sample(2, labels=1, tol=torch.tensor(0.5), guidance=torch.tensor(0.5)).x.isfinite().all()
    with pytest.raises(TypeError, match="gudance"):
        flow.plan("sequential", gudance=3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: jf.MAF(f.config), "takes a MAFConfig, not TarFlowConfig"),
        (lambda f: jf.TarFlow({"image_size": 8}), "takes a TarFlowConfig, not dict"),
        (lambda f: jf.tune(None), "takes a Flow, not NoneType"),
        (lambda f: jf.tune(f, progress=None), "progress must be a function, not None"),
        (lambda f: jf.tune(f, 10**400), "noise of 1000"),
        (lambda f: jf.decode(f, f.noise(1), jf.Method()), "decode takes a Block, not TarFlow"),
        (lambda f: jf.decode(f.bound_blocks(1)[0], [1.0], jf.Method()), "decode takes a Tensor, not list"),
        (lambda f: jf.decode(f.bound_blocks(1)[0], f.noise(1), 3), "decode takes a Method, not int"),
        (lambda f: jf.save_images(None, "a.png"), "save_images takes a Tensor, not NoneType"),
        (lambda f: jf.save_images(torch.zeros(16), "a.png"), r"shape \[16\] are no images"),
        (lambda f: jf.save_images(torch.zeros(1, 16, 16), "a.png"), r"shape \[1, 16, 16\] are no images"),
        (lambda f: jf.save_images(torch.zeros(1, 1, 4, 4), "a.png", columns=0), "columns must be 1 or more, not 0"),
        (lambda f: jf.save_images(torch.zeros(1, 1, 4, 4), "a.png", gap=-1), "gap must be 0 or more, not -1"),
        (lambda f: jf.save_images(torch.zeros(1, 1, 4, 4), "a.png", zoom=10**9), "zoom must be 100 or less"),
        (lambda f: jf.load("mnist", device=2**70), "sees no device"),
        (lambda f: f.save("model", card=3), "card takes a str, not int"),
        (lambda f: f.save("model", dtype=[]), r"bfloat16, not \[\]"),
        (lambda f: jf.load(None), "a model is a name, a folder or a hub id, not None"),
        (lambda f: jf.load("mnist", dtype=torch.int32), "dtype must be a type of floats"),
        (lambda f: jf.load("mnist", dtype="float32"), "dtype must be a type of floats"),
        (lambda f: jf.load("mnist", device="cuda:99"), "sees no device 'cuda:99'"),
        (lambda f: jf.load("mnist", device="foo"), "sees no device 'foo'"),
        (lambda f: f.plan("uniform").save("/proc/plan.json"), "cannot write the plan /proc/plan.json"),
        (lambda f: f.save("/dev/null"), "cannot write /dev/null"),
        (lambda f: f.save("a\0b"), "embedded null byte"),
    ],
)
def test_what_the_library_refuses(flow: jf.Flow, call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(flow)


@pytest.mark.parametrize(
    "call", [lambda f: jf.save_images(f.noise(1), 3), lambda f: f.save(None), lambda f: f.sample(1).save(b"a.png")]
)
def test_what_is_no_path(flow: jf.Flow, call: Any) -> None:
    with pytest.raises(TypeError, match=r"(path|folder) must be a path, not "):
        call(flow)
