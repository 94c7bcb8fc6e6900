"""Masked dependencies: what is masked has no influence, what is not has all of it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jacobiflow as jf
from jacobiflow.flows.transformer import TransformerConditioner
from jacobiflow_lab.analysis.redundancy import deviation, mask, redundancy
from subjects import NAMES, subject

SUBJECTS = [
    "tarflow-labels",
    "tarflow-guided",
    "tarflow-annealed",
    "maf-affine",
    "nsf-context",
    "maf-lattice",
]
SEQUENTIAL = jf.Method(width=1)
TRANSFORMERS = ["tarflow", "tarflow-labels", "tarflow-guided", "tarflow-attn-temp"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_masked_is_plain_decoding(name: str) -> None:
    s = subject(name)
    z = s.flow.noise(3, seed=0).reshape(3, s.length, -1)
    block = s.block(0, 3)
    plain = jf.decode(block, z, SEQUENTIAL)
    for variant in ("strict", "attention") if name.startswith("tarflow") else ("strict",):
        out = jf.decode(mask(block, 0, variant), z, SEQUENTIAL)
        assert torch.equal(out.x, plain.x)
        assert torch.equal(out.log_det, plain.log_det)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("o", [1, 2, 5])
def test_strict_parameters_do_not_see_the_nearest(name: str, o: int) -> None:
    s = subject(name)
    conditioner = mask(s.block(0, 2), o, "strict").conditioner
    x = s.flow.noise(2, seed=1).reshape(2, s.length, -1)
    theta = conditioner.all_params(x)
    seen = 0
    for t in range(1, s.length):
        near = x.clone()
        near[:, max(t - o, 0) :] += 1 + torch.rand_like(near[:, max(t - o, 0) :])
        assert (conditioner.all_params(near) - theta)[:, t].abs().max() < 1e-12
        if t - o > 0:
            far = x.clone()
            far[:, : t - o] += 1
            seen += (conditioner.all_params(far) - theta)[:, t].abs().max().item() > 1e-6
    assert seen == s.length - 1 - o
    first = s.block(0, 2).conditioner.first(2)
    if not name.endswith("annealed"):
        assert torch.allclose(theta[:, : o + 1], first.expand_as(theta[:, : o + 1]))


@pytest.mark.parametrize("name", ["tarflow-labels", "tarflow-guided", "maf-affine"])
@pytest.mark.parametrize("variant", ["strict", "attention"])
def test_masked_blocks_are_blocks(name: str, variant: str) -> None:
    """Decoded by the one loop: any width, cached or not, gives the sequential answer, and its inverse."""
    if variant == "attention" and name.startswith("maf"):
        pytest.skip("no attention")
    s = subject(name)
    z = s.flow.noise(3, seed=2).reshape(3, s.length, -1)
    block = mask(s.block(0, 3), 2, variant)
    out = jf.decode(block, z, SEQUENTIAL)
    for method in (jf.Method(), jf.Method(width=5)):
        for cache in (True, False):
            assert (jf.decode(block, z, method, cache=cache).x - out.x).abs().max() < 1e-9
    again, log_det = block.forward(out.x)
    assert (again - z).abs().max() < 1e-9
    assert torch.allclose(log_det, -out.log_det)
    assert (out.x - jf.decode(s.block(0, 3), z, SEQUENTIAL).x).abs().max() > 1e-3  # it does mask
    alone = jf.decode(block.select(torch.tensor([1])), z[1:2], SEQUENTIAL).x
    assert (alone - out.x[1:2]).abs().max() < 1e-9


def reference(block: TransformerConditioner, x: Tensor, o: int) -> Tensor:
    """Attention written out: softmax over the keys that are left, nothing where there are none."""
    w = block.weights
    h = w.proj_in(x[:, :-1]) + w.pos_embed[:-1] + (0 if block.condition is None else block.condition)
    place = torch.arange(h.shape[1])
    keep = place[None, :] <= place[:, None] - o  # the key of position j for the output at i
    for layer in w.net.layers:
        n, t, _ = h.shape
        q, k, v = layer.qkv(layer.norm1(h)).view(n, t, 3, layer.heads, layer.head_dim).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(layer.head_dim)
        logits = logits if block.temperature is None else logits / block.temperature.view(-1, 1, 1, 1)
        weight = logits.exp() * keep
        weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)
        h = h + layer.proj((weight @ v).transpose(1, 2).reshape(n, t, -1))
        h = h + layer.down(F.gelu(layer.up(layer.norm2(h))))
    zero = x.new_zeros(len(x), 1, w.proj_out.out_features)
    return torch.cat((zero, w.proj_out(h)), 1)


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("o", [0, 1, 2, 5])
def test_attention_drops_precisely_those_keys(name: str, o: int) -> None:
    s = subject(name)
    whole, block = (b.conditioner for b in (s.block(0, 3), mask(s.block(0, 3), o, "attention")))
    x = s.flow.noise(3, seed=4)
    if name.endswith(("guided", "temp")):  # one conditioner of 2 n rows: informed ones, then the others
        whole, block, x = whole.inner, block.inner, torch.cat((x, x))
    want = reference(whole, x, o)
    assert torch.allclose(block.all_params(x), want, atol=1e-12)
    cache = block.new_cache(len(x))
    parts = [block.params(x, lo, min(4, s.length - lo), cache) for lo in range(1, s.length, 4)]
    assert torch.allclose(torch.cat(parts, 1), want[:, 1:], atol=1e-12)
    cache, rows = block.new_cache(len(x)), torch.arange(len(x))
    for step in range(s.length // 2):  # rows at positions of their own
        start = (1 + step * (2 + rows % 3)).clamp_max(s.length - 1)
        theta = block.params(x, start, 6, cache)
        for i, at in enumerate(start.tolist()):
            own = min(6, s.length - at)
            assert torch.allclose(theta[i, :own], want[i, at : at + own], atol=1e-12)
    assert (o == 0) == torch.allclose(want, whole.all_params(x), atol=1e-12)


def test_attention_masking_in_single_precision_does_not_take_the_compiled_path() -> None:
    s, fine = subject("tarflow-labels", torch.float32), subject("tarflow-labels")
    z = s.flow.noise(3, seed=0)
    out = jf.decode(mask(s.block(0, 3), 2, "attention"), z, SEQUENTIAL)
    want = jf.decode(mask(fine.block(0, 3), 2, "attention"), fine.flow.noise(3, seed=0), SEQUENTIAL)
    assert (out.x - want.x).abs().max() < 1e-3
    assert (out.x - jf.decode(s.block(0, 3), z, SEQUENTIAL).x).abs().max() > 1e-2


def test_only_transformers_have_attention() -> None:
    s = subject("maf-affine")
    with pytest.raises(ValueError, match="use the variant 'strict'"):
        mask(s.block(0, 2), 1, "attention")
    with pytest.raises(ValueError, match="0 or more"):
        mask(s.block(0, 2), -1, "strict")
    with pytest.raises(ValueError, match="one of attention, strict"):
        mask(s.block(0, 2), 1, "loose")
    assert {m.variant for m in redundancy(s.flow, s.flow.noise(2, seed=0), offsets=[1]).masked} == {"strict"}


@pytest.mark.parametrize("name", ["tarflow-labels", "maf-context"])
def test_layers_given_exact_inputs_and_along_a_masked_generation(name: str) -> None:
    s = subject(name)
    z, given = s.flow.noise(4, seed=0), s.condition(4)
    found = redundancy(s.flow, z, offsets=[0, 2], **given)
    assert found.samples == 4
    assert torch.equal(found.exact, s.flow.decode(z, "sequential", **given).x)
    for m in found.masked:
        assert len(m.layers) == len(m.along) == len(s.flow.blocks)
        assert m.layers[0] == m.along[0]  # the first layer has the same input either way
        if m.o == 0:
            assert all(d.l2 == 0 and d.cosine == pytest.approx(1) for d in (*m.layers, *m.along))
            assert torch.equal(m.x, found.exact)
        else:
            assert all(d.l2 > 0 and d.cosine < 1 for d in m.layers)
            assert m.along[-1].l2 > 0
    (last,) = (m for m in found.masked if m.variant == "strict" and m.o == 2)
    seq, k = s.flow.to_prior(z), 1
    block = s.flow.bound_blocks(4, **given)[0]
    masked, exact = (jf.decode(b, seq, SEQUENTIAL).x for b in (mask(block, 2, "strict"), block))
    gap = (masked - exact).flatten(1)
    assert last.layers[k - 1].l2 == pytest.approx(gap.norm(dim=1).mean().item())
    assert last.layers[k - 1].l2_error == pytest.approx(gap.norm(dim=1).std().item() / 2)
    doc = found.to_dict()
    assert "exact" not in doc
    assert doc["masked"][1]["layers"][0].keys() == {"cosine", "l2", "l2_error", "relative", "lost"}


def test_deviation_is_of_samples_that_have_an_answer() -> None:
    a, b = torch.ones(3, 2, 2), torch.ones(3, 2, 2)
    a[0] = 2.0
    a[1, 0, 0] = math.inf
    found = deviation(a, b)
    assert found.lost == 1
    assert found.l2 == pytest.approx(1.0)  # of 2 and 0
    assert found.relative == pytest.approx(0.5)
    assert found.cosine == pytest.approx(1.0)
