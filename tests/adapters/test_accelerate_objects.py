"""What acceleration does to objects: nothing but one attribute, which goes where they go."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pyro.distributions as dist
import pytest
import torch
import zuko
from nflows.distributions.normal import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform, ReversePermutation
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import CASES, D, context_rows, perturb


def maf(features: int = D, layers: int = 2, scale: float = 0.1, **options: Any) -> Flow:
    torch.manual_seed(0)
    steps: list[nn.Module] = []
    for _ in range(layers):
        steps += [
            MaskedAffineAutoregressiveTransform(features, 32, use_residual_blocks=False, **options),
            ReversePermutation(features),
        ]
    return perturb(Flow(CompositeTransform(steps), StandardNormal([features])), scale).double()


def sample(flow: Flow, n: int = 6) -> Tensor:
    z = torch.randn(n, D, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        return flow._transform.inverse(z.to(next(flow.parameters())))[0]


def test_it_is_the_same_object_and_restore_leaves_no_trace(sweeps: list[Any]) -> None:
    flow, other = maf(), maf()
    before = {name: dict(vars(m)) for name, m in flow.named_modules()}
    exact = sample(flow)
    assert jf.accelerate(flow) is flow
    assert list(flow.state_dict()) == list(other.state_dict())
    assert repr(flow) == repr(other)
    assert (sample(flow) - exact).abs().max() < 1e-10
    assert len(sweeps) == 2
    sample(other)  # another instance of the same classes
    assert len(sweeps) == 2
    assert jf.restore(flow) is flow
    assert {name: dict(vars(m)) for name, m in flow.named_modules()} == before
    assert torch.equal(sample(flow), exact)
    assert len(sweeps) == 2


def test_the_context_manager_takes_off_only_what_it_put_on(sweeps: list[Any]) -> None:
    flow = maf()
    with jf.accelerated(flow, tol=1e-3) as same:
        assert same is flow
        sample(flow)
    sample(flow)
    assert len(sweeps) == 2
    first = flow._transform._transforms[0]
    jf.accelerate(first, tol=1e-5)
    with jf.accelerated(flow, tol=1e-3):
        assert first.inverse.tol == 1e-3
    assert first.inverse.tol == 1e-5
    sample(flow)
    assert len(sweeps) == 3


COPIES = {
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda m: _saved(m),
}


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["nflows-affine", "zuko-nsf", "zuko-naf", "normflows-rq", "pyro-affine"])
def test_copies_are_accelerated_and_their_own(name: str, how: str, sweeps: list[Any]) -> None:
    case = CASES[name]
    model = jf.accelerate(case.model(0, torch.float64))
    z = case.noise(5, dtype=torch.float64)
    with torch.no_grad():
        x = case.run(model, z, None)[0]
        twin = COPIES[how](model)
        sweeps.clear()
        assert torch.equal(case.run(twin, z, None)[0], x)
        assert sweeps
        perturb(twin, 0.2)
        assert not torch.equal(case.run(twin, z, None)[0], x)
        assert torch.equal(case.run(model, z, None)[0], x)
        sweeps.clear()
        exact = case.run(jf.restore(twin), z, None)[0]
        assert not sweeps
        assert (case.run(jf.accelerate(twin), z, None)[0] - exact).abs().max() < 1e-5


def test_changed_weights_are_honoured() -> None:
    flow = jf.accelerate(maf())
    names = [n for n, p in flow.named_parameters() if p.ndim == 2]
    changes = {
        "in place": lambda p: p.add_(0.1),
        "through .data": lambda p: p.data.add_(0.1),
        "replaced": lambda p: setattr(p, "data", p.data + 0.1),
    }
    for change in changes.values():
        for name in (names[0], names[-1]):
            before = sample(flow)
            with torch.no_grad():
                change(flow.get_parameter(name))
            after = sample(flow)
            assert (after - before).abs().max() > 1e-4
            assert (sample(jf.restore(flow)) - after).abs().max() < 1e-10
            jf.accelerate(flow)
    other = perturb(maf(), 0.2, seed=3)
    flow.load_state_dict(other.state_dict())
    assert (sample(flow) - sample(other)).abs().max() < 1e-10
    flow.float()
    assert sample(flow).dtype == torch.float32


def test_masks_that_are_loaded_count() -> None:
    """Random masks are buffers: a state dict brings others."""
    flow, other = (maf(random_mask=True) for _ in range(2))
    for m in other.modules():
        if isinstance(m, MaskedAffineAutoregressiveTransform):
            m.autoregressive_net = type(m)(D, 32, use_residual_blocks=False, random_mask=True).autoregressive_net
    jf.accelerate(flow)
    sample(flow)
    flow.load_state_dict(other.double().state_dict())
    assert (sample(flow) - sample(other)).abs().max() < 1e-10


def test_boolean_masks_that_are_loaded_count(sweeps: list[Any]) -> None:
    """They are written in place: what was read from them before must not change with them."""
    case = CASES["zuko-nsf-randperm"]
    flow, other = (case.model(0, torch.float64, seed) for seed in (0, 1))
    z = case.noise(5, dtype=torch.float64)
    with torch.no_grad():
        case.run(jf.accelerate(flow), z, None)
        flow.load_state_dict(other.state_dict())
        found, expected = case.run(flow, z, None)[0], case.run(other, z, None)[0]
    assert (found - expected).abs().max() < 1e-10


def test_further_training_works() -> None:
    flow, plain = maf(), maf()
    jf.accelerate(flow)
    x = torch.randn(64, D, dtype=torch.float64)
    for one in (flow, plain):
        optimizer = torch.optim.Adam(one.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            (-one.log_prob(x).mean()).backward()
            optimizer.step()
            sample(one)
    assert (sample(flow) - sample(plain)).abs().max() < 1e-10


@pytest.mark.parametrize("options", [{"use_batch_norm": True}, {"dropout_probability": 0.5}])
def test_noisy_conditioners_run_the_original_in_training(options: dict[str, Any], sweeps: list[Any]) -> None:
    flow = jf.accelerate(maf(**options))
    sample(flow)
    assert len(sweeps) == 2
    flow.train()
    sample(flow)
    assert len(sweeps) == 2
    flow.eval()
    sample(flow)
    assert len(sweeps) == 4


def test_batch_norm_between_transforms_and_embedding_nets_are_evaluated_once(sweeps: list[Any]) -> None:
    from nflows.transforms import BatchNorm

    class Embedding(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Embedding.calls += 1
            return super().forward(x)

    torch.manual_seed(0)
    layers = [MaskedAffineAutoregressiveTransform(D, 32, context_features=4), BatchNorm(D)]
    flow = perturb(Flow(CompositeTransform(layers), StandardNormal([D]), Embedding(3, 4))).double()
    noise = torch.randn(6, D, dtype=torch.float64)
    flow._distribution.sample = lambda n, context: noise.view(2, n, D)  # nflows' own is float32
    context = context_rows(2, torch.float64)
    with torch.no_grad():
        exact = flow.sample(3, context=context)
        Embedding.calls = 0
        x = jf.accelerate(flow).sample(3, context=context)
    assert (x - exact).abs().max() < 1e-10
    assert Embedding.calls == 1
    assert len(sweeps) == 1


def test_nothing_to_accelerate_says_what_was_looked_at() -> None:
    with pytest.raises(jf.AccelerationError, match=r"nothing to accelerate in Sequential.*2 Linear.*1 ReLU"):
        jf.accelerate(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    with pytest.raises(jf.JacobiflowError, match="in dict"):
        jf.accelerate({})
    with pytest.raises(ValueError, match="tol must be in"):
        jf.accelerate(maf(), tol=-1.0)
    with pytest.raises(ValueError, match="tol must be finite, not 'tight'"):
        jf.accelerate(maf(), tol="tight")

    class Own(MaskedAffineAutoregressiveTransform):
        def _elementwise_inverse(self, inputs: Tensor, autoregressive_params: Tensor) -> Any:
            return super()._elementwise_inverse(inputs + 1, autoregressive_params)

    with pytest.raises(jf.AccelerationError, match="1 Own"):
        jf.accelerate(Own(D, 32))


def test_tolerance_is_relative_to_the_scale_of_each_variable(sweeps: list[Any]) -> None:
    """Features of scale 1e-5 next to features of scale 1e4, in float32."""
    scales = torch.logspace(-5, 4, D)
    torch.manual_seed(0)
    transform = perturb(MaskedAffineAutoregressiveTransform(D, 32, use_residual_blocks=False), 0.3)
    net = transform.autoregressive_net
    with torch.no_grad():
        net.initial_layer.weight.div_(scales)
        net.final_layer.weight[0::2].mul_(0.3)
        net.final_layer.bias[0::2] = -scales.log()  # softplus(u) is about 1 / scale where that is small
        wide = scales < 1
        net.final_layer.bias[0::2][wide] = 1 / scales[wide]
        transform._epsilon = 1e-9
    z = torch.randn(50, D)
    with torch.no_grad():
        exact, log_det = copy.deepcopy(transform).double().inverse(z.double())
        original = transform.inverse(z)[0]
        x, found = jf.accelerate(transform).inverse(z)
    spread = exact.std(0)
    assert spread.max() / spread.min() > 1e6
    error = ((x - exact).abs() / spread).max()
    assert error < max(1e-5, 3 * ((original - exact).abs() / spread).max())
    assert ((found - log_det).abs() <= 1e-5 * log_det.abs().clamp_min(1)).all()


STRETCH = 1.2


def bad_flow(activation: Any) -> Flow:
    """Rows far out have no finite inverse in float32; the others are easy."""
    flow = maf(features=24, layers=3, scale=0.3, activation=activation).float()
    with torch.no_grad():
        for m in flow._transform._transforms[::2]:
            m._epsilon = 0.0
            m.autoregressive_net.final_layer.weight[0::2].mul_(STRETCH)
    return flow


def one_at_a_time(flow: Flow, z: Tensor) -> Tensor:
    """The inverse by its definition: a feature is written when those before it are right, never earlier."""
    for transform in reversed(flow._transform._transforms):
        if isinstance(transform, ReversePermutation):
            z = transform.inverse(z)[0]
            continue
        x = torch.zeros_like(z)
        for t in range(z.shape[1]):
            x[:, t] = transform._elementwise_inverse(z, transform.autoregressive_net(x))[0][:, t]
        z = x
    return z


@pytest.mark.parametrize("activation", [nn.functional.relu, lambda x: x.relu()], ids=["cached", "full passes"])
def test_rows_without_a_finite_inverse(activation: Any, sweeps: list[Any]) -> None:
    """They are the rows that have none by definition. nflows loses a few more on the way, when a guess
    overflows; of those we return the inverse."""
    flow = bad_flow(activation)
    z = torch.randn(200, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        good = one_at_a_time(flow, z).isfinite().all(1)
        assert 10 < int((~good).sum()) < 190
        x = flow._transform.inverse(z)[0]
        assert not x[~good].isfinite().all(1).any()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y, found = jf.accelerate(flow)._transform.inverse(z)
        alone = flow._transform.inverse(z[good])[0]
    counted = [int(str(w.message).split()[0]) for w in caught]
    assert sum(counted) == int((~good).sum())  # each row once, however many layers follow
    assert torch.equal(y.isfinite().all(1), good)
    assert torch.equal(y[~good].isnan(), x[~good].isnan())
    assert not found[~good].isfinite().any()
    assert found[good].isfinite().all()
    assert torch.equal(y[good], alone) or (y[good] / alone - 1).abs().median() < 1e-6
    evaluated = sum(int(call.stats.blocks[0].evaluated[~good].max()) for call in sweeps[:3])
    assert evaluated < 3 * 24 * 23 / 2  # no bad row took all the passes


def test_overflow_of_the_last_feature_alone_is_as_in_the_original(sweeps: list[Any]) -> None:
    torch.manual_seed(0)
    transform = perturb(MaskedAffineAutoregressiveTransform(D, 24))
    transform._epsilon = 0.0
    z = torch.randn(4, D)
    z[0, -1] = 0.1
    with torch.no_grad():
        transform.autoregressive_net.final_layer.bias[-2] = -86.0  # the scale is about 1e-37
        transform.autoregressive_net.final_layer.weight[-2].zero_()
        z[1:, -1] *= 1e4
        x, log_det = transform.inverse(z)
        assert x[:, -1].isfinite().tolist() == [True, False, False, False]
        with pytest.warns(RuntimeWarning, match="3 of 4 samples"):
            y, found = jf.accelerate(transform).inverse(z)
    torch.testing.assert_close(y, x, atol=1e-5, rtol=1e-5, equal_nan=True)
    torch.testing.assert_close(found, log_det, atol=1e-4, rtol=1e-5, equal_nan=True)
    assert sweeps


def test_a_pyro_distribution_and_a_zuko_distribution(sweeps: list[Any]) -> None:
    spline = CASES["pyro-spline-linear"].model(0, torch.float32)
    base = dist.Normal(torch.zeros(D), torch.ones(D)).to_event(1)
    pyro_flow = dist.TransformedDistribution(base, [spline])
    x = torch.randn(4, D)
    with torch.no_grad():
        exact = pyro_flow.log_prob(x)
        pyro_flow.clear_cache()
        assert (jf.accelerate(pyro_flow).log_prob(x) - exact).abs().max() < 1e-4
    assert len(sweeps) == 1
    zuko_flow = perturb(zuko.flows.NSF(D, 3, transforms=2)).double()(context_rows(2, torch.float64))
    torch.manual_seed(0)
    exact = zuko_flow.rsample((3,))
    jf.accelerate(zuko_flow)
    torch.manual_seed(0)
    assert (zuko_flow.rsample((3,)) - exact).abs().max() < 1e-10
    assert len(sweeps) == 3
    jf.restore(zuko_flow)
    zuko_flow.rsample((3,))
    assert len(sweeps) == 3


def test_memory_of_a_backward_pass_does_not_grow_with_sweeps(sweeps: list[Any]) -> None:
    """Peak of what autograd keeps, forward and backward, at 1 and at 64 sweeps."""

    def kept(strength: float, noise: float) -> tuple[int, int]:
        torch.manual_seed(0)
        transform = MaskedAffineAutoregressiveTransform(65, 64, use_residual_blocks=False).double()
        with torch.no_grad():
            # Each feature sees the one before it alone, by `strength`: a chain as long as there are features.
            net = transform.autoregressive_net
            for p in net.parameters():
                p.zero_()
            for t in range(64):
                net.initial_layer.weight[t, t] = 1.0
                net.blocks[0].linear.weight[t, t] = net.blocks[1].linear.weight[t, t] = 1.0
                net.final_layer.weight[2 * (t + 1) + 1, t] = strength
        z = (noise * torch.linspace(1, 2, 3 * 65, dtype=torch.float64)).view(3, 65).requires_grad_()
        jf.accelerate(transform)
        sizes: list[int] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x, log_det = transform.inverse(z)
            (x.sum() + log_det.sum()).backward()
        assert z.grad is not None
        return sum(sizes), int(sweeps[-1].stats.blocks[0].sweeps.max())

    (few, a), (many, b) = kept(0.0, 0.0), kept(-0.9, 1.0)
    assert (a, b) == (1, 64)
    assert many < 1.01 * few  # one sweep more would keep 3 * 65 numbers and more


def test_reverse_kl_training_through_accelerated_samples(sweeps: list[Any]) -> None:
    torch.manual_seed(0)
    flow = jf.accelerate(zuko.flows.MAF(12, transforms=2, hidden_features=(32,)))
    covariance = torch.eye(12) + 0.5 * torch.ones(12, 12)
    target = torch.distributions.MultivariateNormal(torch.linspace(-1, 1, 12), covariance)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.02)
    gaps = []
    for _ in range(120):
        optimizer.zero_grad()
        x, log_q = flow().rsample_and_log_prob((64,))
        gap = (log_q - target.log_prob(x)).mean()
        gap.backward()
        optimizer.step()
        gaps.append(gap.item())
    assert gaps[0] > 2
    assert sum(gaps[-20:]) / 20 < 0.3
    assert len(sweeps) == 240


def test_second_derivatives_are_a_clear_error(sweeps: list[Any]) -> None:
    flow = jf.accelerate(zuko.flows.MAF(32, transforms=1))
    x = flow().rsample((3,))
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(x.sum(), list(flow.parameters()), create_graph=True, allow_unused=True)


def test_importing_jacobiflow_imports_no_other_library() -> None:
    code = (
        "import sys, jacobiflow; "
        "sys.exit(', '.join({'nflows', 'zuko', 'normflows', 'sbi', 'pyro'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
