"""Arguments of the library that make no sense: one line of the project's own, whatever was given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from subjects import maf, tarflow


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
    "labels that are words": ("labels must be a whole number", lambda f: f.sample(1, labels="cat")),
    "labels of an object": ("labels must be a whole number", lambda f: f.sample(1, labels=object())),
    "labels of a table": ("labels must be a whole number", lambda f: f.sample(1, labels={})),
    "complex labels": ("labels must be a whole", lambda f: f.sample(1, labels=torch.tensor([1j]))),
    "labels of floats": ("labels must be a whole", lambda f: f.sample(1, labels=torch.zeros(1))),
    "a label of 10^30": ("labels must be a whole number", lambda f: f.sample(1, labels=10**30)),
    "no plan": ("a plan is a name, a jf.Plan or a path", lambda f: f.sample(1, plan=3)),
    "a plan that is a number": ("a plan is a name, a jf.Plan or a path", lambda f: f.sample(1, plan=3)),
    "a plan with a name of 10,000": ("no plan is called 'aaaa", lambda f: f.sample(1, plan="a" * 10_000)),
    "a tol that is none": ("tol must be finite", lambda f: f.sample(1, tol=math.nan)),
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
        (jf.Guidance, {"weight": "1"}, "weight must be finite"),
        (jf.Guidance, {"weight": 1e300}, "weight must be within"),
        (jf.Guidance, {"attn_temp": 1e-300}, "attn_temp must be from 1e-06 to 1e"),
        (jf.Guidance, {"attn_temp": 0}, "attn_temp must be finite and positive"),
    ],
)
def test_configs(kind: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind(**options)


def test_numbers_of_numpy_are_numbers(flow: jf.Flow, tmp_path: Path) -> None:
    assert len(flow.sample(np.int64(2), seed=np.uint8(3), labels=np.array([0, 1])).x) == 2
    jf.MAF(jf.MAFConfig(features=np.int64(3), hidden=np.array([4]))).save(tmp_path)
    assert jf.load(tmp_path).config.hidden == (4,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda f: jf.MAF(f.config), "takes a MAFConfig, not TarFlowConfig"),
        (lambda f: jf.TarFlow({"image_size": 8}), "takes a TarFlowConfig, not dict"),
        (lambda f: jf.tune(None), "takes a Flow, not NoneType"),
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
