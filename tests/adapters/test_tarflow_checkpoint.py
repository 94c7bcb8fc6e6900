"""Imported checkpoints against a plain implementation of the public model, written from its description."""

from __future__ import annotations

import math
import random
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from jacobiflow.adapters import tarflow_checkpoint
from jacobiflow.adapters.tarflow_checkpoint import import_tarflow
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.checkpoint import CheckpointError
from jacobiflow.flows.guidance import Guidance
from public_tarflow import Shape, public

# The public model, in float64 and slowly


def to_patches(x, s: Shape):
    rows = []
    for i in range(0, s.size, s.patch):
        for j in range(0, s.size, s.patch):
            rows.append(
                torch.stack(
                    [x[:, c, i + u, j + v] for c in range(s.channels) for u in range(s.patch) for v in range(s.patch)],
                    dim=1,
                )
            )
    return torch.stack(rows, dim=1)


def to_image(seq, s: Shape):
    x = torch.empty(len(seq), s.channels, s.size, s.size, dtype=seq.dtype)
    t = 0
    for i in range(0, s.size, s.patch):
        for j in range(0, s.size, s.patch):
            d = 0
            for c in range(s.channels):
                for u in range(s.patch):
                    for v in range(s.patch):
                        x[:, c, i + u, j + v] = seq[:, t, d]
                        d += 1
            t += 1
    return x


def layer_norm(h, sd, name):
    centred = h - h.mean(-1, keepdim=True)
    spread = torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)
    return centred / spread * sd[f"{name}.weight"] + sd[f"{name}.bias"]


def linear(h, sd, name):
    return h @ sd[f"{name}.weight"].T + sd[f"{name}.bias"]


def attention(h, sd, name, temp):
    w = h.shape[-1]
    qkv = linear(layer_norm(h, sd, f"{name}.norm"), sd, f"{name}.qkv")
    future = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
    heads = []
    for at in range(0, w, 64):
        q, k, v = (qkv[..., base + at : base + at + 64] for base in (0, w, 2 * w))
        logits = q @ k.transpose(1, 2) / math.sqrt(64) / temp
        weight = torch.exp(logits.masked_fill(future, -math.inf))
        heads.append(weight / weight.sum(-1, keepdim=True) @ v)
    return linear(torch.cat(heads, -1), sd, f"{name}.proj")


def mlp(h, sd, name):
    h = linear(layer_norm(h, sd, f"{name}.norm"), sd, f"{name}.main.0")
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    return linear(h, sd, f"{name}.main.2")


def network(sd, s: Shape, k, x, labels, temp=1.0):
    """a and b of every position [n, T, D], from x in the block's own order."""
    b = f"blocks.{k}"
    places = sd[f"{b}.pos_embed"]
    h = linear(x, sd, f"{b}.proj_in") + (places.flip(0) if k % 2 else places)
    if s.classes:
        table = sd[f"{b}.class_embed"][:, 0]
        mean = sum(table) / len(table)
        picked = [mean if labels is None or labels[n] == -1 else table[labels[n]] for n in range(len(x))]
        h = h + torch.stack(picked)[:, None]
    for i in range(s.layers):
        h = h + attention(h, sd, f"{b}.attn_blocks.{i}.attention", temp)
        h = h + mlp(h, sd, f"{b}.attn_blocks.{i}.mlp")
    out = linear(h, sd, f"{b}.proj_out")
    out = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)
    if s.preserving:
        return torch.zeros_like(out), out
    return out[..., : s.dim], out[..., s.dim :]


def density(sd, s: Shape, x, labels=None):
    """The latent that the last block gives, and the log-determinant so far."""
    seq, log_det = to_patches(x, s), 0
    for k in range(s.blocks):
        seq = seq.flip(1) if k % 2 else seq
        a, b = network(sd, s, k, seq, labels)
        seq = (seq - b) * torch.exp(-a)
        log_det = log_det - a.sum((1, 2))
        seq = seq.flip(1) if k % 2 else seq
    return seq, log_det


def sampling(sd, s: Shape, z, labels=None, weight=0.0, what="ab", annealed=False, temp=1.0):
    seq = z * torch.sqrt(sd["var"])
    for k in reversed(range(s.blocks)):
        seq = seq.flip(1) if k % 2 else seq
        x = seq.clone()
        for t in range(1, s.length):
            a, b = network(sd, s, k, x, labels)
            a0, b0 = network(sd, s, k, x, None, temp) if weight else (a, b)
            w = weight * t / (s.length - 1) if annealed else weight
            if "a" in what:
                a = a + w * (a - a0)
            if "b" in what:
                b = b + w * (b - b0)
            x[:, t] = seq[:, t] * torch.exp(a[:, t]) + b[:, t]
        seq = x.flip(1) if k % 2 else x
    return to_image(seq, s)


SHAPES = {
    "conditional": Shape(classes=4),
    "unconditional": Shape(size=8, layers=1),
    "preserving": Shape(classes=3, preserving=True),
    "preserving unconditional grey": Shape(channels=1, preserving=True),
    "two heads, one channel": Shape(width=128, channels=1, size=8, classes=2, layers=1),
    "one layer, two blocks, patch 3": Shape(patch=3, blocks=2, layers=1),
}
subjects = pytest.mark.parametrize("s", SHAPES.values(), ids=SHAPES.keys())


def labels_of(s: Shape):
    return torch.tensor([0, -1, s.classes - 1]) if s.classes else None


def images(s: Shape, n=3):
    g = torch.Generator().manual_seed(7)
    return torch.randn(n, s.channels, s.size, s.size, generator=g, dtype=torch.float64)


def close(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-10


# Same numbers


@subjects
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
def test_density_is_the_public_models(s, labelled):
    sd, x = public(s), images(s)
    labels = labels_of(s) if labelled else None
    flow = import_tarflow(sd, s.channels)
    latent, log_det = density(sd, s, x, labels)
    z = latent / torch.sqrt(sd["var"])
    log_det = log_det - 0.5 * torch.log(sd["var"]).sum()
    log_normal = torch.distributions.Normal(0.0, 1.0).log_prob(z).sum((1, 2))
    with torch.no_grad():
        enc = flow.encode(x, labels)
        close(enc.z, z)
        close(enc.log_det, log_det)
        close(flow.log_prob(x, labels), log_normal + log_det)


@subjects
@pytest.mark.parametrize("labelled", [True, False], ids=["labels", "no labels"])
def test_samples_are_the_public_models(s, labelled):
    sd = public(s)
    labels = labels_of(s) if labelled else None
    flow = import_tarflow(sd, s.channels)
    z = flow.noise(3, seed=1)
    close(flow.decode(z, "sequential", labels=labels).x, sampling(sd, s, z, labels))


GUIDED = ("conditional", "unconditional", "preserving", "two heads, one channel")


@pytest.mark.parametrize("s", [SHAPES[name] for name in GUIDED], ids=GUIDED)
@pytest.mark.parametrize(
    ("what", "annealed", "temp"),
    [("ab", False, 1.0), ("a", False, 1.0), ("b", True, 1.0), ("ab", True, 1.5), ("a", True, 0.7)],
)
def test_guided_samples_are_the_public_models(s, what, annealed, temp):
    sd, labels = public(s), labels_of(s)
    flow = import_tarflow(sd, s.channels)
    z = flow.noise(3, seed=2)
    guidance = Guidance(weight=0.8, what=what, annealed=annealed, attn_temp=temp)
    plain = flow.decode(z, "sequential", labels=labels).x
    public_x = sampling(sd, s, z, labels, 0.8, what, annealed, temp)
    idle = "guidance without labels" if not s.classes and temp == 1 else ""
    if what == "a" and s.preserving:
        idle = "guidance on 'a'"
    if idle:
        close(plain, public_x)
        with pytest.raises(ValueError, match=f"{idle} changes nothing"):
            flow.decode(z, "sequential", labels=labels, guidance=guidance)
        return
    ours = flow.decode(z, "sequential", labels=labels, guidance=guidance).x
    close(ours, public_x)
    assert (ours - plain).abs().max() > 1e-3


@subjects
def test_sizes_are_read_off_the_shapes(s):
    c = import_tarflow(public(s), s.channels).config
    assert (c.image_size, c.image_channels, c.patch_size) == (s.size, s.channels, s.patch)
    assert (c.width, c.blocks, c.layers_per_block, c.head_dim) == (s.width, s.blocks, s.layers, 64)
    assert (c.num_classes, c.volume_preserving, c.noise_std) == (s.classes, s.preserving, 0.0)


# Ways to hand it over

SMALL = Shape(patch=1, size=2, channels=1, blocks=2, layers=1, classes=2)
NAME = "toy_model_1_64_2_1_0.07"


WEIGHTS = public(SMALL)


def small(dtype=torch.float32):
    return {key: value.to(dtype, copy=True) for key, value in WEIGHTS.items()}


def same_weights(one, two):
    one, two = one.state_dict(), two.state_dict()
    return one.keys() == two.keys() and all(one[k].dtype == two[k].dtype and torch.equal(one[k], two[k]) for k in one)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".PTH", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_files_hold_what_the_dict_holds(tmp_path, suffix, dtype):
    sd, path = small(dtype), tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(sd, path)
    assert same_weights(import_tarflow(path, 1), import_tarflow(sd, 1))
    assert same_weights(import_tarflow(str(path), 1), import_tarflow(sd, 1))


@pytest.mark.parametrize("wrapper", ["model", "state_dict", "ema"])
def test_a_nested_state_dict_is_found(tmp_path, wrapper):
    torch.save({wrapper: small(), "epoch": 3}, tmp_path / "a.pth")
    assert same_weights(import_tarflow(tmp_path / "a.pth", 1), import_tarflow(small(), 1))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_are_stripped(prefix):
    sd = {prefix + key: value for key, value in small().items()}
    assert same_weights(import_tarflow(sd, 1), import_tarflow(small(), 1))


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_precision_is_kept_and_half_becomes_single(dtype, want):
    sd = small(dtype)
    flow = import_tarflow(sd, 1)
    assert {t.dtype for t in flow.state_dict().values()} == {want}
    assert torch.equal(flow.blocks[0].proj_in.weight, sd["blocks.0.proj_in.weight"].to(want))


def test_buffers_are_optional():
    sd = {k: v for k, v in small().items() if k != "var" and not k.endswith("attn_mask")}
    assert same_weights(import_tarflow(sd, 1), import_tarflow(small(), 1))


def test_the_dict_and_the_random_state_stay_as_they_were():
    sd = small()
    before = {k: v.clone() for k, v in sd.items()}
    state = torch.get_rng_state()
    flow = import_tarflow(sd, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.requires_grad for p in flow.parameters())
    with torch.no_grad():
        for p in flow.state_dict().values():
            p.add_(1.0)
    assert all(torch.equal(sd[k], before[k]) for k in before)


@pytest.mark.parametrize(
    ("name", "given", "want"),
    [
        (f"{NAME}.pth", None, 0.07),
        (f"{NAME}.safetensors", None, 0.07),
        (f"{NAME[10:]}.pt", None, 0.07),
        (f"{NAME}.pth", 0.2, 0.2),
        (f"{NAME}.pth", 0, 0.0),
        ("weights.pth", None, 0.0),
        ("run_2024_11_15_12_30.pth", None, 0.0),
        ("weights.pth", 0.3, 0.3),
    ],
)
def test_noise_is_given_or_in_the_public_name(tmp_path, name, given, want):
    (save_file if name.endswith("safetensors") else torch.save)(small(), tmp_path / name)
    assert import_tarflow(tmp_path / name, 1, given).config.noise_std == want


# Errors


def refused(what, match, channels=1, noise_std=None):
    with pytest.raises(CheckpointError, match=match) as caught:
        import_tarflow(what, channels, noise_std)
    assert isinstance(caught.value, JacobiflowError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


PUBLIC_KEYS = sorted(small())
NEEDED = [k for k in PUBLIC_KEYS if k != "var" and not k.endswith("attn_mask")]


@pytest.mark.parametrize("key", NEEDED)
def test_every_key_is_needed(key):
    sd = small()
    del sd[key]
    refused(sd, f"{key} is missing")


def test_a_missing_block_or_layer_is_a_missing_key():
    sd = {k: v for k, v in public(SHAPES["conditional"]).items() if not k.startswith("blocks.1.")}
    refused(sd, r"blocks\.1\.pos_embed is missing", channels=3)
    sd = {k: v for k, v in public(SHAPES["conditional"]).items() if "0.attn_blocks.0." not in k}
    refused(sd, r"blocks\.0\.attn_blocks\.0\.\S+ is missing", channels=3)
    refused({k: v for k, v in small().items() if "attn_blocks" not in k}, r"attn_blocks\.0\..* is missing")
    refused({}, r"blocks\.0\.proj_in\.weight is missing")


@pytest.mark.parametrize("key", PUBLIC_KEYS)
def test_every_shape_is_checked(key):
    sd = small()
    shape = list(sd[key].shape)
    wrong = [*shape[:-1], shape[-1] + 64]
    sd[key] = torch.ones(wrong)
    message = refused(sd, "blocks|var")
    if key != "blocks.0.proj_in.weight":  # which says what the others should be
        shown = shape if key != "blocks.0.class_embed" else ["classes", 1, 64]
        shown = ["length", 64] if key == "blocks.0.pos_embed" else shown
        shown = ["2 or 1", 64] if key == "blocks.0.proj_out.weight" else shown
        assert f"{key} has shape {wrong}, expected [{', '.join(map(str, shown))}]" in message


@pytest.mark.parametrize("key", PUBLIC_KEYS)
def test_odd_ranks_and_empty_tensors_are_wrong_shapes(key):
    for value in (torch.tensor(1.0), torch.ones(0, 64), torch.ones(1, 1, 1, 1)):
        refused({**small(), key: value}, f"{key} has shape")


def test_an_output_that_is_neither_variant_is_refused():
    sd = {**small(), "blocks.0.proj_out.weight": torch.ones(5, 64)}
    refused(sd, r"blocks\.0\.proj_out\.weight has shape \[5, 64\], expected \[2, 64\]")


def test_classes_must_agree_between_blocks():
    sd = {**small(), "blocks.1.class_embed": torch.ones(3, 1, 64)}
    refused(sd, r"blocks\.1\.class_embed has shape \[3, 1, 64\], expected \[2, 1, 64\]")


@pytest.mark.parametrize(
    "key",
    ["step", "blocks.0.extra", "blocks.0.attn_blocks.0.attention.sqrt_scale", "blocks.00.attn_mask", "a\nb"],
)
def test_unexpected_keys_are_named(key):
    match = key.split("\n")[0].replace(".", r"\.")
    if key == "blocks.00.attn_mask":  # counts as one more block
        match = r"blocks\.2\.pos_embed is missing"
    refused({**small(), key: torch.ones(1)}, match)


@pytest.mark.parametrize("key", [*NEEDED, "var"])
def test_weights_must_be_finite(key):
    sd = small()
    for bad in (math.nan, math.inf, -math.inf):
        sd[key].view(-1)[-1] = bad
        refused(sd, f"{key} has non-finite values")


@pytest.mark.parametrize("key", PUBLIC_KEYS)
def test_values_must_be_tensors(key):
    sd = small()
    for value in (None, 1.0, "text", [1.0], {"a": 1}):
        refused({**sd, key: value}, f"{key} is a {type(value).__name__}, not a tensor")


@pytest.mark.parametrize("key", [*NEEDED, "var"])
def test_weights_must_be_floating_point(key):
    sd = small()
    for dtype in (torch.int64, torch.bool, torch.complex64):
        refused({**sd, key: sd[key].to(dtype)}, f"{key} is {dtype}, not floating point")


def test_weights_must_be_dense():
    dense = torch.ones(4, 64)
    for value in (dense.to("meta"), dense.to_sparse(), torch.ones(1, 64).expand(4, 64)):
        refused({**small(), "blocks.1.pos_embed": value}, r"blocks\.1\.pos_embed must be a dense tensor")
    import_tarflow({**small(), "blocks.1.pos_embed": torch.ones(64, 4).T}, 1)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_var_must_be_positive(bad):
    sd = small()
    sd["var"][1, 0] = bad
    refused(sd, "var must be positive")


def test_sizes_that_no_tarflow_has():
    refused(small(), r"blocks\.0\.proj_in\.weight: 1 numbers per patch are not image_channels 3", channels=3)
    refused(small(), "image_channels must be 1 or more, not 0", channels=0)
    refused(public(Shape(width=96, channels=1)), r"blocks\.0\.proj_in\.weight: width 96")
    sd = small()
    for k in range(2):
        sd[f"blocks.{k}.pos_embed"] = torch.ones(5, 64)
    refused(sd, r"blocks\.0\.pos_embed: 5 positions")


@pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf])
def test_noise_must_be_a_size(noise):
    with pytest.raises(ValueError, match="noise_std must be finite"):
        import_tarflow(small(), 1, noise)


def test_state_dicts_must_be_clear():
    refused({"model": small(), "ema": small()}, "model and ema")
    refused({**small(), "module.var": small()["var"]}, "'var' is there twice")
    refused({**small(), 3: torch.ones(1)}, "text, not 3")
    with pytest.raises(TypeError, match="path_or_state_dict must be a path, not 3"):
        import_tarflow(3)
    refused(small(), "image_channels must be a whole number, not 1.5", channels=1.5)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("m_2_64_2_1_0.07", "patch_size 2, the weights have 1"),
        ("m_1_128_2_1_0.07", "width 128, the weights have 64"),
        ("m_1_64_8_1_0.07", "blocks 8, the weights have 2"),
        ("m_1_64_2_8_0.07", "layers_per_block 8, the weights have 1"),
    ],
)
@pytest.mark.parametrize("noise_std", [None, 0.1])
def test_a_public_name_must_fit_the_weights(tmp_path, name, match, noise_std):
    torch.save(small(), tmp_path / f"{name}.pth")
    refused(tmp_path / f"{name}.pth", match, noise_std=noise_std)


def test_paths_that_hold_no_checkpoint(tmp_path):
    refused(tmp_path / "none.pth", "none.pth: there is no such file")
    refused("nul\0.pth", "there is no such file")
    (tmp_path / "folder.pth").mkdir()
    refused(tmp_path / "folder.pth", "folder.pth: is a folder")
    refused(tmp_path, "a .pth, .pt or .safetensors file")
    (tmp_path / "weights.ckpt").write_bytes(b"")
    refused(tmp_path / "weights.ckpt", r"weights\.ckpt: a checkpoint is a \.pth, \.pt or \.safetensors file")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"\x80\x02}q\x00.", b"PK\x05\x06" + bytes(18)])
def test_files_of_something_else(tmp_path, suffix, content):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    refused(path, f"a{suffix}: damaged, truncated or not")


def test_zip_files_of_something_else(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pth", "w") as archive:
        archive.writestr("readme.txt", "hello")
    refused(tmp_path / "a.pth", "a.pth: damaged, truncated or not in the format of .pth files")
    torch.save([torch.ones(1)], tmp_path / "b.pth")
    refused(tmp_path / "b.pth", "b.pth: holds a list, not a state dict")


class Planted:
    ran = False

    @classmethod
    def fire(cls):
        cls.ran = True

    def __reduce__(self):
        return Planted.fire, ()


def test_no_code_of_a_file_runs(tmp_path):
    torch.save({**small(), "extra": Planted()}, tmp_path / "a.pth")
    refused(tmp_path / "a.pth", "holds Python objects beside tensors")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "b.pth")
    refused(tmp_path / "b.pth", "holds Python objects beside tensors")
    assert not Planted.ran


@pytest.mark.parametrize("version", ["2.9.1", "2.6.0+cpu", "2.10.0a0+git1"])
def test_old_torch_reads_safetensors_only(tmp_path, monkeypatch, version):
    torch.save(small(), tmp_path / "a.pth")
    save_file(small(), tmp_path / "a.safetensors")
    monkeypatch.setattr(tarflow_checkpoint.torch, "__version__", version)
    monkeypatch.setattr(tarflow_checkpoint.torch, "load", lambda *a, **k: pytest.fail("torch.load was called"))
    refused(tmp_path / "a.pth", r"upgrade to torch 2\.10 or newer, or convert the file to safetensors")
    import_tarflow(tmp_path / "a.safetensors", 1)


# Damage


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    """The bytes of a file a.pth and its flow."""
    path = tmp_path_factory.mktemp("intact") / "a.pth"
    torch.save(small(), path)
    return path.read_bytes(), import_tarflow(small(), 1)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_files_are_refused(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(small(), path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), len(whole) // 100), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, "damaged")


def entry_with(whole, name, offset, value):
    """The archive with one byte of the central directory's entry of `name` changed."""
    damaged = bytearray(whole)
    start = whole.rindex(name) - 46
    assert whole[start : start + 4] == b"PK\x01\x02"
    damaged[start + offset] = value
    return damaged


@pytest.mark.parametrize(
    ("offset", "value"),
    [(10, 8), (21, 0), (24, 1), (38, 0x10)],
    ids=["compressed", "stored size", "size", "folder"],
)
def test_entries_that_torch_would_not_read_are_refused(tmp_path, intact, offset, value):
    path = tmp_path / "a.pth"
    path.write_bytes(entry_with(intact[0], b"a/data/30", offset, value))
    refused(path, "damaged: 'a/data/30' is not as torch.save wrote it")


def test_checksums_are_checked(tmp_path, intact):
    whole, _ = intact
    weights = small()["blocks.1.proj_in.weight"].numpy().tobytes()
    damaged = bytearray(whole)
    damaged[whole.index(weights) + 5] ^= 1
    (tmp_path / "a.pth").write_bytes(damaged)
    refused(tmp_path / "a.pth", "damaged: 'a/data/.*' is not as torch.save wrote it")


def test_entries_must_be_there_once(tmp_path, intact):
    path = tmp_path / "a.pth"
    path.write_bytes(intact[0])
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("a/data/0", archive.read("a/data/0"))
    refused(path, "damaged: 'a/data/0' is not as torch.save wrote it")


def outcome(path):
    try:
        return import_tarflow(path, 1)
    except CheckpointError as error:
        return error


def test_flipped_bytes_never_pass_as_weights(tmp_path, intact):
    whole, flow = intact
    rng = random.Random(0)
    directory = whole.rindex(b"PK\x05\x06")
    places = rng.sample(range(len(whole)), 100) + rng.sample(range(directory - 2000, len(whole)), 100)
    path = tmp_path / "a.pth"
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = outcome(path)
        if isinstance(found, CheckpointError):
            assert "\n" not in str(found)
        else:
            assert same_weights(found, flow), place
