"""FID and KID: the arithmetic against closed forms, streams against wholes, what is kept between runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jacobiflow.core.processes import World
from jacobiflow.data.decoding import Images
from jacobiflow_lab import metrics
from jacobiflow_lab.metrics import MetricError, Moments, fid_of, frechet, kid, moments, real_moments
from jacobiflow_lab.metrics.bootstrap import Change, kid_of_rows
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.fid import FRECHET, _frechet_rows, _GivenFeatures
from jacobiflow_lab.metrics.moments import Collector, stored_features
from stand_ins import Tiny


def normal(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariance(d: int, seed: int) -> Tensor:
    root = normal(d, d, seed)
    return root @ root.T / d


def test_gaussians_whose_covariances_commute() -> None:
    """|mu1 - mu2|^2 + sum (sqrt a - sqrt b)^2, in any basis."""
    basis = torch.linalg.qr(normal(6, 6, 1)).Q
    a, b = torch.tensor([4.0, 1, 9, 0, 2, 5]).double(), torch.tensor([1.0, 1, 16, 3, 0, 5]).double()
    shift = normal(1, 6, 2)[0]
    found = frechet(torch.zeros(6), basis * a @ basis.T, shift, basis * b @ basis.T)
    assert found == pytest.approx(float(shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum()), abs=1e-6)


def test_gaussians_whose_covariances_do_not_commute() -> None:
    linalg = importlib.import_module("scipy.linalg")
    a, b = covariance(7, 3), covariance(7, 4)
    root = linalg.sqrtm((a @ b).numpy()).real
    want = float(a.trace() + b.trace()) - 2 * float(root.trace())
    assert frechet(torch.zeros(7), a, torch.zeros(7), b) == pytest.approx(want, rel=1e-9)
    assert want > 0.1


@pytest.mark.parametrize(("n", "d"), [(50, 8), (20, 64)], ids=["more images", "fewer images than numbers"])
def test_features_of_a_known_shift_and_scale(n: int, d: int) -> None:
    x = normal(n, d).float()
    shift = torch.linspace(-1, 1, d)
    found = fid_of(x, 1.5 * x + shift)
    mean, cov = x.double().mean(0), torch.cov(x.double().T)
    want = (0.5 * mean + shift).square().sum() + 0.25 * cov.trace()
    assert found.value == pytest.approx(float(want), rel=1e-5)
    assert (found.samples, found.real) == (n, n)
    assert fid_of(x, x).value == pytest.approx(0, abs=1e-5)
    assert fid_of(x, x[torch.randperm(n)]).value == pytest.approx(0, abs=1e-5)


def test_samples_of_gaussians_approach_the_closed_form() -> None:
    a, b = normal(20_000, 4, 1), 2 * normal(20_000, 4, 2) + 3
    assert fid_of(a.float(), b.float()).value == pytest.approx(4 * 9 + 4 * 1, rel=0.02)


def test_it_is_torchmetrics_figure() -> None:
    module = importlib.import_module("torchmetrics.image.fid")
    a, b = normal(40, 10, 1).float(), (normal(30, 10, 2) * torch.linspace(0.5, 2, 10)).float()
    metric = module.FrechetInceptionDistance(_GivenFeatures(10))
    metric.update(a, real=True)
    metric.update(b, real=False)
    assert fid_of(a, b).value == pytest.approx(float(metric.compute()), rel=1e-4)


def test_few_rows_are_the_same_as_their_moments() -> None:
    a, b = normal(12, 30, 1), normal(15, 30, 2) + 0.5
    one, two = Moments.of(a), Moments.of(b)
    whole = frechet(one.mean, one.cov, two.mean, two.cov)
    assert _frechet_rows(a.float().double(), b.float().double()) == pytest.approx(whole, rel=1e-6)


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that come in any order and are not kept give the same figures."""
    x = (normal(90, 5, 1) + 3).float()
    whole, seen = Moments.of(x), None
    monkeypatch.setattr(moments, "KEEP", 40)
    seen = Collector(90)
    for start in (30, 0, 60):
        seen.add(start, x[start : start + 30])
    found = seen.moments(World())
    assert torch.equal(found.features, x[:40])
    assert found.count == 90
    assert torch.allclose(found.mean, whole.mean, atol=1e-12)
    assert torch.allclose(found.cov, whole.cov, atol=1e-10)
    assert fid_of(found, whole).value == pytest.approx(0, abs=1e-6)


def test_the_bias_of_small_counts_is_said_and_kid_has_none() -> None:
    draws = normal(4000, 64, 1).float()
    few, many = fid_of(draws[:100], draws[100:200]), fid_of(draws[:2000], draws[2000:])
    assert few.value > 5 * many.value
    note = FRECHET.to_dict(few)["note"]
    for words in ("biased upwards", "(100 samples, 100 real images)", "KID"):
        assert words in note
    parts = draws.split(100)
    small = torch.tensor([kid(a, b, subsets=10).value for a, b in zip(parts[::2], parts[1::2], strict=True)])
    assert abs(small.mean()) < 3 * small.std() / len(small) ** 0.5
    far = kid(draws[:100], draws[100:200] + 0.3)
    assert far.value > 3 * far.std


def test_kid_is_the_unbiased_estimate() -> None:
    a, b = normal(9, 4, 1), normal(9, 4, 2) + 1

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / 4 + 1) ** 3

    inner = [(k.sum() - k.trace()) / (9 * 8) for k in (kernel(a, a), kernel(b, b))]
    found = kid(a, b, subset_size=9, subsets=3)
    assert found.value == pytest.approx(float(inner[0] + inner[1] - 2 * kernel(a, b).mean()), rel=1e-9)
    assert found.std == pytest.approx(0, abs=1e-9)


def test_kid_draws_its_subsets_by_seed_and_leaves_other_draws_alone() -> None:
    a, b = normal(30, 4, 1), normal(30, 4, 2)
    state = torch.get_rng_state()
    assert kid(a, b) == kid(a, b)
    assert torch.equal(state, torch.get_rng_state())
    assert kid(a, b, seed=1).value != kid(a, b).value
    assert kid(a, b).subset_size == 15


def test_refusals() -> None:
    with pytest.raises(MetricError, match="features of 3 and of 4 numbers"):
        fid_of(torch.zeros(5, 3), torch.zeros(5, 4))
    with pytest.raises(MetricError, match="2 images or more of each kind, not 5 and 1"):
        fid_of(torch.zeros(5, 3), torch.zeros(1, 3))
    with pytest.raises(MetricError, match="subsets of 2 images or more of the 4 that there are, not 100 of 9"):
        kid(torch.zeros(4, 3), torch.zeros(5, 3), subset_size=9)


def test_statistics_of_real_images_are_kept_by_content(
    images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    first, again = Tiny(), Tiny()
    found = real_moments(images, first)
    assert (first.seen, found.count) == (60, 60)
    held = real_moments(images, again, work=DistributedMap(batch=7))
    assert again.seen == 0
    assert torch.equal(held.features, found.features)

    other = Tiny()
    changed = images.pixels.clone()
    changed[3, 0, 2, 1] ^= 1
    real_moments(Images(changed), other)
    assert other.seen == 60  # another pixel, another name
    other.version = "tiny-2"
    real_moments(images, other)
    assert other.seen == 120  # another network, too
    assert len(list((tmp_path / "features").iterdir())) == 3


@pytest.mark.parametrize("damage", ["flipped", "cut", "other"])
def test_damaged_statistics_are_made_again(
    images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    want = real_moments(images, Tiny()).features
    (path,) = (tmp_path / "features").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[20] ^= 255
    elif damage == "cut":
        del content[-10:]
    path.write_bytes(bytes(content) if damage != "other" else b"nothing")
    network = Tiny()
    assert torch.equal(real_moments(images, network).features, want)
    assert network.seen == 60


def test_statistics_that_others_can_write_are_not_used(
    images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    real_moments(images, Tiny())
    (tmp_path / "features").chmod(0o777)
    network = Tiny()
    with pytest.warns(UserWarning, match="others can write to it"):
        real_moments(images, network)
    assert network.seen == 60


def test_many_real_images(images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """More than are kept: sums come back from the cache as they were."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    whole = real_moments(images, Tiny())
    (path,) = (tmp_path / "features").iterdir()
    path.unlink()
    monkeypatch.setattr(moments, "KEEP", 25)
    found, held = real_moments(images, Tiny()), real_moments(images, Tiny())
    assert len(held.features) == 25
    assert torch.equal(held.cov, found.cov)
    assert torch.allclose(held.cov, whole.cov)


def test_a_cache_that_cannot_be_written_to(images: Images, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="nothing is kept between runs; set JACOBIFLOW_CACHE"):
        assert real_moments(images, Tiny()).count == 60


def test_paired_changes_see_what_unpaired_ones_cannot() -> None:
    draw = torch.Generator().manual_seed(0)
    real = Moments.of(torch.randn(300, 4, generator=draw))
    before = torch.randn(200, 4, generator=draw) + 0.5
    after = before + 0.05  # all samples move a little away from the real ones
    found = metrics.paired_changes(real, before, after, resamples=60)
    for name, value in (("fid", lambda x: fid_of(real, x).value), ("kid", lambda x: kid(real, x).value)):
        change = found[name]
        assert change is not None
        assert 0 < change.low < change.value < change.high  # the interval of either alone is far wider
        assert change.value == pytest.approx(value(after) / value(before) - 1, rel=0.05)
    same = metrics.paired_changes(real, before, before, resamples=5)
    assert same["fid"] == same["kid"] == Change(value=0.0, low=0.0, high=0.0)
    assert set(metrics.paired_changes(real, before, after, fid=False, resamples=2)) == {"kid"}
    near = metrics.paired_changes(Moments.of(before), before.flip(0), after, resamples=2)
    assert near["kid"] is None  # nothing to divide by


def test_a_row_that_is_drawn_twice_is_no_pair_of_itself() -> None:
    draw = torch.Generator().manual_seed(0)
    real, x = Moments.of(torch.randn(40, 3, generator=draw)), torch.randn(30, 3, generator=draw)
    every = kid_of_rows(real, x)
    whole = kid(real, x[:30], subsets=1, subset_size=30).value
    assert every(torch.arange(30)) != pytest.approx(whole)  # torchmetrics takes 30 of the 40 real ones
    exact = kid(Moments.of(real.features[:30]), x, subsets=1, subset_size=30).value
    assert kid_of_rows(Moments.of(real.features[:30]), x)(torch.arange(30)) == pytest.approx(exact, rel=1e-6)
    draws = torch.randint(30, (4000, 30), generator=draw)
    mean = sum(every(rows) for rows in draws) / 4000
    assert mean == pytest.approx(every(torch.arange(30)), abs=0.02)  # counted as pairs, it would be biased


def test_features_of_batches_are_computed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    seen: list[int] = []

    class Count:
        version, num_features = "count", 2

        def __call__(self, pixels: Tensor) -> Tensor:
            seen.append(len(pixels))
            return pixels.float().mean((1, 3))[:, :2]

    pixels = torch.randint(256, (5, 1, 4, 4), dtype=torch.uint8)
    first = stored_features(pixels, Count())
    assert torch.equal(first, stored_features(pixels.clone(), Count()))
    assert seen == [5]
    stored_features(pixels + 1, Count())
    assert seen == [5, 5]
