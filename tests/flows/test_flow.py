"""Flow: noise, labels, context, denoising, and what it refuses."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows.transformer import TransformerConditioner
from subjects import maf, subject, tarflow


def test_a_row_of_noise_depends_on_seed_and_index_only() -> None:
    flow = subject("tarflow").flow
    z = flow.noise(40, seed=3)
    assert z.shape == (40, 16, 4)
    assert torch.equal(flow.noise(7, seed=3), z[:7])
    assert torch.equal(flow.noise(5, seed=3, start=30), z[30:35])
    assert not torch.equal(flow.noise(1, seed=4), z[:1])
    assert len(z.flatten(1).unique(dim=0)) == 40
    assert torch.equal(subject("tarflow", torch.float32).flow.noise(3, seed=3), z[:3].float())
    assert not torch.equal(flow.noise(2), flow.noise(2))  # no seed: fresh noise
    with pytest.raises(ValueError, match="0 or more"):
        flow.noise(-1)


def test_without_a_seed_torchs_own_generators_decide() -> None:
    flow = subject("tarflow", torch.float32).flow
    torch.manual_seed(5)
    one, two = (flow.sample(3, plan="sequential").x for _ in range(2))
    assert not torch.equal(one, two)  # fresh noise in every call
    torch.manual_seed(5)
    assert torch.equal(flow.sample(3, plan="sequential").x, one)
    z = torch.randn(3, *flow.latent_shape, generator=torch.Generator().manual_seed(8))
    own = flow.sample(3, plan="sequential", generator=torch.Generator().manual_seed(8)).x
    assert torch.equal(own, flow.decode(z, "sequential").x)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    seeded = flow.sample(8, plan="sequential", seed=3).x
    assert torch.equal(torch.random.get_rng_state(), before)  # a seed leaves torch's generator alone
    parts = flow.sample(8, plan="sequential", seed=3, batch_size=3).x
    assert torch.allclose(parts, seeded, atol=1e-5)
    with pytest.raises(TypeError, match="seed and generator exclude each other: give one of them"):
        flow.sample(1, seed=0, generator=torch.Generator())


def test_progress_is_shown_per_sample(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    flow = subject("tarflow", torch.float32).flow
    flow.sample(10, seed=0, batch_size=4, plan="sequential")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("jacobiflow.core.progress.LINE_SECONDS", 0.0)
    flow.sample(10, seed=0, batch_size=4, plan="sequential", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines if line.startswith(("4 ", "8 ", "10 "))] == [
        "4 of 10 samples",
        "8 of 10 samples",
        "10 of 10 samples",
    ]


def test_noise_is_standard_normal() -> None:
    z = subject("maf-exp").flow.noise(4000, seed=0)
    assert abs(z.mean().item()) < 4 / z.numel() ** 0.5
    assert abs(z.var().item() - 1) < 4 * (2 / z.numel()) ** 0.5
    corr = torch.corrcoef(z.T) - torch.eye(19)
    assert corr.abs().max() < 5 / 4000**0.5


def test_sample_decodes_the_noise() -> None:
    flow = subject("tarflow-labels").flow
    out = flow.sample(4, labels=2, plan="selective", tol=0.1, seed=9)
    same = flow.decode(flow.noise(4, seed=9), "selective", tol=0.1, labels=torch.full((4,), 2))
    assert torch.equal(out.x, same.x)
    assert torch.equal(out.log_det, same.log_det)
    assert out.x.shape == (4, 1, 8, 8)


def test_log_det_gives_the_density_of_samples() -> None:
    for name in ("tarflow-shift", "maf-affine", "nsf"):
        one = subject(name)
        z = one.flow.noise(3, seed=1)
        out = one.decode(z, "sequential")
        normal = torch.distributions.Normal(0.0, 1.0).log_prob(z).flatten(1).sum(1)
        assert (normal - out.log_det - one.flow.log_prob(out.x, **one.condition(3))).abs().max() < 1e-9


def test_labels() -> None:
    flow = subject("tarflow-labels").flow
    z = flow.noise(3, seed=0)
    given = flow.decode(z, "sequential", labels=torch.tensor([0, 2, -1])).x
    assert torch.equal(given[2], flow.decode(z, "sequential").x[2])  # -1 is no label
    for i, label in enumerate((0, 2)):
        assert (given[i] - flow.decode(z, "sequential", labels=label).x[i]).abs().max() < 1e-12
    assert (given[0] - given[2]).abs().max() > 1e-3
    mean = copy.deepcopy(flow)
    for block in mean.blocks:  # no label is the mean of the classes
        block.class_embed.data[0] = block.class_embed.mean(0)
    assert (mean.decode(z, "sequential", labels=0).x - flow.decode(z, "sequential").x).abs().max() < 1e-12
    for labels, says in (
        (3, "0 .. 2"),
        (-2, "0 .. 2"),
        (torch.tensor([0, 1]), "there are 2 labels for 3 samples"),
        (1.0, "whole number"),
        (torch.zeros(3, 1).long(), "whole number"),
        (True, "whole number"),
        ([0.0, 1.0, 2.0], "whole number, .* not float32 of shape"),
        ([[0, 1, 2]], "whole number, .* not int64 of shape"),
        (np.array([0.5, 1, 2]), "whole number, .* not float64 of shape"),
        ([0, None, 1], "whole number"),
        (range(4), "there are 4 labels for 3 samples"),
        ([], "there are 0 labels for 3 samples"),
        ([0, 7, 1], "0 .. 2, or -1 for none, not 7"),
        (np.array([0, -3, 1]), "0 .. 2, or -1 for none, not -3"),
    ):
        with pytest.raises(ValueError, match=says):
            flow.decode(z, labels=labels)
    with pytest.raises(ValueError, match="takes no labels"):
        subject("tarflow").flow.sample(1, labels=0)


LABELS = {
    "a list": [0, 1, 2],
    "a tuple": (0, 1, 2),
    "a range": range(3),
    "an array": np.arange(3),
    "an array of short numbers": np.arange(3, dtype=np.uint16),
    "a reversed array": np.array([2, 1, 0])[::-1],
    "a tensor": torch.arange(3, dtype=torch.int32),
}


@pytest.mark.parametrize("kind", LABELS)
def test_every_kind_of_labels(kind: str) -> None:
    flow, given = subject("tarflow-labels").flow, LABELS[kind]
    z, want = flow.noise(3, seed=0), torch.arange(3)
    exact = flow.decode(z, "sequential", labels=want).x
    assert torch.equal(flow.decode(z, "sequential", labels=given).x, exact)
    assert torch.equal(flow.sample(3, seed=0, plan="sequential", labels=given).x, exact)
    parts = flow.sample(3, seed=0, plan="sequential", labels=given, batch_size=2).x
    assert (parts - exact).abs().max() < 1e-12
    assert torch.equal(flow.encode(exact, given).z, flow.encode(exact, want).z)
    assert torch.equal(flow.log_prob(exact, given), flow.log_prob(exact, want))


def test_context() -> None:
    flow = subject("maf-context").flow
    c = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = flow.noise(3, seed=0)
    rows = flow.decode(z, "sequential", context=c).x
    for i in range(3):
        alone = flow.decode(z, "sequential", context=c[i])  # one context for all rows
        assert (alone.x[i] - rows[i]).abs().max() < 1e-12
    assert (rows - flow.decode(z, "sequential", context=c + 1).x).abs().max() > 1e-3
    for bad in (None, c[:2], c[:, :2], c[0, 0]):
        with pytest.raises(ValueError, match=r"needs context of shape \[3, 3\]"):
            flow.decode(z, context=bad)
    with pytest.raises(ValueError, match="takes no context"):
        subject("maf-exp").flow.sample(3, context=c)
    with pytest.raises(ValueError, match="guidance is for TarFlow"):
        subject("maf-exp").flow.sample(3, guidance=1.0)


def test_denoise_is_one_gradient_step() -> None:
    flow = subject("tarflow-labels").flow
    x = flow.sample(2, seed=0, labels=1).x
    h = 1e-5
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    slope = (flow.log_prob(x + h * direction, 1) - flow.log_prob(x - h * direction, 1)) / (2 * h)
    step = flow.denoise(x, labels=1) - x
    assert torch.allclose((step * direction).flatten(1).sum(1), 0.1**2 * slope, rtol=1e-6)
    out = flow.sample(2, seed=0, labels=1, denoise=True)
    assert torch.equal(out.x, flow.denoise(x, labels=1))
    assert not out.x.requires_grad
    with pytest.raises(ValueError, match="nothing to denoise"):
        subject("maf-exp").flow.denoise(torch.zeros(1, 19).double())


def test_guidance_pushes_parameters() -> None:
    """By the formula, on the first block next to the noise."""
    flow = subject("tarflow-labels").flow
    z = flow.noise(2, seed=0)
    labels = torch.tensor([0, 2])
    weights, last = flow.blocks[-1], len(flow.blocks) - 1
    x = flow.decode(z, "sequential", labels=labels).x
    seq = flow.to_sequence(x)
    theta = TransformerConditioner(weights, weights.condition(labels)).all_params(seq)
    hot = torch.full((1,), 1.3, dtype=torch.float64)
    null = TransformerConditioner(weights, weights.condition(None), temperature=hot).all_params(seq)
    for what, on in (("ab", (1, 1)), ("a", (1, 0)), ("b", (0, 1))):
        for annealed in (False, True):
            guide = jf.Guidance(weight=1.5, what=what, annealed=annealed, attn_temp=1.3)
            found = flow.bind(last, 2, labels, guide)[0].all_params(seq)
            w = 1.5 * torch.tensor(on, dtype=torch.float64).repeat_interleave(4)
            w = w * (torch.arange(16, dtype=torch.float64) / 15 if annealed else torch.ones(16))[:, None]
            assert (found - (theta + w * (theta - null))).abs().max() < 1e-12
    plain = flow.decode(z, "sequential", labels=labels, guidance=1.5).x
    assert torch.equal(plain, flow.decode(z, "sequential", labels=labels, guidance=jf.Guidance(weight=1.5)).x)
    assert torch.equal(flow.decode(z, "sequential", labels=labels, guidance=0.0).x, x)
    for bad in ({"what": "c"}, {"attn_temp": 0.0}, {"weight": float("nan")}):
        with pytest.raises(ValueError, match=f"Guidance.{next(iter(bad))}"):
            jf.Guidance(**bad)


def test_guidance_that_changes_nothing_is_an_error() -> None:
    flow, plain = tarflow(0.25, num_classes=3).float(), tarflow(0.25).float()
    z = flow.noise(4, seed=0)
    give = "guidance without labels changes nothing at attn_temp 1: give labels, or another temperature"
    for labels in (None, -1):
        for call in (lambda **o: flow.decode(z, **o), lambda **o: flow.sample(4, **o)):
            with pytest.raises(ValueError, match=give):
                call(labels=labels, guidance=2.0)
        with pytest.raises(ValueError, match=give):
            jf.tune(flow, 4, labels=labels, guidance=2.0)
    with pytest.raises(ValueError, match=give):
        plain.sample(4, guidance=2.0)
    with pytest.raises(ValueError, match="guidance of weight 0 changes nothing: give a weight"):
        flow.sample(4, labels=1, guidance=jf.Guidance(annealed=True))
    shift = tarflow(0.25, num_classes=3, volume_preserving=True).float()
    with pytest.raises(ValueError, match="volume-preserving flow: use 'b' or 'ab'"):
        shift.sample(4, labels=1, guidance=jf.Guidance(2, what="a"))
    warm = jf.Guidance(2, attn_temp=1.5)  # what the message says has an effect
    assert not torch.equal(plain.sample(4, seed=0, guidance=warm).x, plain.sample(4, seed=0).x)
    some = torch.tensor([-1, -1, 0, 2])  # samples without a label among others are fine, in any batch
    alone = flow.sample(4, labels=some, seed=0, guidance=2.0, batch_size=2, plan="sequential").x
    assert torch.allclose(alone, flow.decode(z, "sequential", labels=some, guidance=2.0).x, atol=1e-5)


def test_a_sample_can_be_checked() -> None:
    flow = subject("tarflow-labels").flow
    out = flow.sample(3, seed=0, labels=[0, 1, 2], tol=0.1, check=True, batch_size=2)
    want = flow.decode(flow.noise(3, seed=0), labels=torch.arange(3), tol=0.1, check=True)
    assert torch.allclose(out.stats.residual, want.stats.residual, rtol=1e-3)
    assert out.stats.residual.max() > 0
    assert flow.sample(3, seed=0).stats.residual is None


def test_unknown_options_are_type_errors() -> None:
    flow = subject("maf-exp").flow
    with pytest.raises(TypeError):
        flow.sample(1, temperature=2.0)
    contract = (  # the names that scripts rely on
        "n labels context plan tol init max_deviation seed generator guidance denoise check on_failure "
        "backend batch_size progress"
    )
    assert list(inspect.signature(flow.sample).parameters) == contract.split()
    with pytest.raises(TypeError):
        jf.TarFlowConfig(image_size=8, depth=3)
    with pytest.raises(TypeError):
        jf.Method(width=1, steps=2)
    with pytest.raises(ValueError, match=r"x must be \[N, 19\]"):
        flow.log_prob(torch.zeros(2, 18).double())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"image_size": 9}, "patch_size 2 does not divide"),
        ({"width": 40}, "head_dim 16 does not divide"),
        ({"blocks": 0}, "blocks must be 1 or more"),
        ({"num_classes": -1}, "num_classes"),
        ({"noise_std": float("inf")}, "noise_std"),
    ],
)
def test_tarflow_shapes_that_make_no_sense(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tarflow(0.0, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"features": 0}, "features"),
        ({"hidden": ()}, "hidden"),
        ({"hidden": (8, 9), "residual": True}, "all the same"),
        ({"transform": "cubic"}, "transform"),
        ({"order": "sorted"}, "order"),
        ({"order": ((0, 1), (1, 0))}, "one permutation"),
        ({"min_scale": 1.0}, "min_scale"),
        ({"activation": "sin"}, "activation"),
    ],
)
def test_maf_shapes_that_make_no_sense(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        maf(0.0, **options)


def test_a_fresh_maf_is_the_identity() -> None:
    for options in ({}, {"scale": "sigmoid"}, {"scale": "exp"}, {"transform": "spline"}):
        flow = maf(0.0, order="random", **options).double()
        z = flow.noise(3, seed=0)
        limit = 0.02 if options.get("scale") == "sigmoid" else 1e-6  # a sigmoid gets near 1 only
        assert (flow.sample(3, seed=0).x - z).abs().max() < 3 * limit * z.abs().max()


def test_explicit_orders() -> None:
    """Position t of a block is feature order[t]: it sees the features before it in that order only."""
    order = ((2, 0, 3, 1), (1, 3, 0, 2))
    flow = maf(1.0, features=4, blocks=2, order=order).double()
    for k in range(2):
        single = maf(1.0, features=4, blocks=1, order=(order[k],)).double()
        x = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
        jacobian = torch.autograd.functional.jacobian(lambda v, f=single: f.encode(v).z, x)[0, :, 0]
        for i, place in enumerate(order[k]):
            for later in order[k][i + 1 :]:
                assert jacobian[place, later] == 0
            if i:
                assert jacobian[place, order[k][0]] != 0
    assert flow.decode(flow.noise(2, seed=0), check=True, tol=0.0).stats.residual.max() < 1e-12


def test_weights_that_change_are_honoured() -> None:
    """What is packed for decoding is packed again after any kind of change."""
    flow = maf(1.0).double()
    z = flow.noise(2, seed=0)

    def check() -> None:
        assert flow.decode(z, "sequential", check=True).stats.residual.max() < 1e-10

    check()
    with torch.no_grad():
        flow.blocks[0].linears[0].weight.mul_(1.1)
    check()
    for p in flow.parameters():
        p.data.mul_(0.9)
    check()
    flow.load_state_dict(maf(1.0, 7).double().state_dict())
    check()
    optimizer = torch.optim.SGD(flow.parameters(), lr=1e-3)
    flow.log_prob(z).mean().backward()
    optimizer.step()
    check()
    flow.float()
    assert flow.decode(z.float(), "sequential", check=True).stats.residual.max() < 1e-4
    again = pickle.loads(pickle.dumps(copy.deepcopy(flow)))
    assert torch.equal(again.decode(z.float(), "sequential").x, flow.decode(z.float(), "sequential").x)


def test_training_gradients_reach_every_weight() -> None:
    for flow in (tarflow(0.2, num_classes=3), maf(1.0, context=2, residual=True, hidden=(16, 16))):
        kw = {"labels": torch.tensor([0, 1, 2])} if flow.num_classes else {"context": torch.randn(3, 2)}
        (-flow.log_prob(torch.randn(3, *flow.data_shape), **kw).mean()).backward()
        for name, p in flow.named_parameters():
            assert p.grad is not None, name
            assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("kind", ["tarflow", "maf"])
def test_numbers_of_another_type_are_refused(kind: str) -> None:
    flow = (maf(0.5) if kind == "maf" else tarflow(0.2)).float()
    z = flow.noise(2, seed=0)
    x = flow.decode(z).x
    for other in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match=r"z is \w+, the flow float32: use z.to\(torch.float32\)"):
            flow.decode(z.to(other))
        with torch.no_grad(), pytest.raises(ValueError, match="x is"):
            flow.encode(x.to(other))
    with pytest.raises(ValueError, match="z must be a dense tensor of floats, not int64"):
        flow.decode(z.long())
    with torch.no_grad(), pytest.raises(ValueError, match="x must be a dense tensor of floats, not int64"):
        flow.encode(x.long())
    block = flow.bound_blocks(2)[0]
    with pytest.raises((ValueError, RuntimeError), match=r"type|the network"):
        jf.decode(block, flow.to_prior(z).double(), jf.Method(width=1))
