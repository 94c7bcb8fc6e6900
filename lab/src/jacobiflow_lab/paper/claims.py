"""The paper's claims, each as a measured yes or no on each of our models, with the number behind it.

How it is told stands in `verdicts`; the rule in words is printed with the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jacobiflow_lab.paper import verdicts as told
from jacobiflow_lab.paper.item import Doc, Docs, find


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, when we say yes, and how it is told from the data of an item."""

    name: str
    item: str
    text: str
    paper: str  # its own figures
    holds_if: str
    verdict: Callable[[Any], told.Verdict]
    ours: bool = False  # the paper does not say so: a question that it leaves open, or one about our code
    models: tuple[str, ...] = ()  # that it is about; none is all of the item's
    trained: bool = False  # of trained flows alone: a doubt that the model is one is said beside it


CLAIMS = (
    Claim(
        name="first-block",
        item="sweeps",
        text="The first block needs many more sweeps than the others.",
        paper="shown for AFHQ by curves",
        holds_if="at least twice the sweeps of any other block, all swept at tau 0.5 from zeros",
        verdict=told.first_block,
        trained=True,
    ),
    Claim(
        name="later-blocks",
        item="sweeps",
        text="The later blocks converge in a few sweeps at tau 0.5.",
        paper="3.0 to 7.5, with one exception of 53.9",
        holds_if="at most 8, mean over samples, selective from zeros",
        verdict=told.later_blocks,
    ),
    Claim(
        name="bounded",
        item="convergence",
        text="There are never more sweeps than positions.",
        paper="proved",
        holds_if="nothing but rounding (1e-9 of the first error) is left after at most as many, in any layer",
        verdict=told.bounded,
    ),
    Claim(
        name="superlinear",
        item="convergence",
        text="The ratio of successive errors falls as sweeps converge.",
        paper="proved near the answer",
        holds_if="in every layer with enough sweeps, the later half gains more a sweep than the earlier half",
        verdict=told.ratio_falls,
    ),
    Claim(
        name="first-layer-deviates",
        item="similarity",
        text="The first layer suffers most from masked dependencies.",
        paper="shown for CIFAR-100 and AFHQ by curves",
        holds_if="o = 5, attention masked: its L2 distance is the largest, its cosine the smallest",
        verdict=told.first_deviates,
    ),
    Claim(
        name="still-pictures",
        item="masked",
        text="Generations with masked dependencies get worse with o and still mean something.",
        paper="shown by pictures",
        holds_if="attention masked: the distance from the standard picture grows with o, and stays nearer at "
        "o = 5 than another picture is",
        verdict=told.still_pictures,
    ),
    Claim(
        name="faster",
        item="comparison",
        text="Selective decoding beats the sequential loop of public code, and uniform decoding, at the "
        "largest batch timed.",
        paper="3.6x, 4.7x and 4.5x at batch 256 on GPUs; uniform 2.4x, 2.9x and 0.8x",
        holds_if="whole batches: its speed-up over that loop is above 1 and above uniform's; our first block "
        "is compiled, the loop is not",
        verdict=told.selective_wins,
    ),
    Claim(
        name="faster-than-compiled",
        item="comparison",
        text="Selective decoding beats our compiled sequential decoding at the largest batch timed.",
        paper="has no such decoder",
        holds_if="its speed-up of decoding alone is above 1",
        verdict=lambda data: told.beats_compiled(data, max),
        ours=True,
    ),
    Claim(
        name="faster-alone",
        item="comparison",
        text="Selective decoding beats our compiled sequential decoding at the smallest batch timed.",
        paper="has no such decoder",
        holds_if="its speed-up of decoding alone is above 1",
        verdict=lambda data: told.beats_compiled(data, min),
        ours=True,
    ),
    Claim(
        name="first-dominates",
        item="runtime",
        text="The first layer takes most of selective decoding's time.",
        paper="56%, 77% and 52% of it",
        holds_if="half of a batch's seconds or more",
        verdict=told.first_dominates,
    ),
    Claim(
        name="quality",
        item="comparison",
        text="Quality at tau 0.5 is within a small degradation of sequential decoding.",
        paper="FID 9.71 to 10.20 (5%), 8.22 to 8.19, 15.42 to 15.44",
        holds_if="KID of the same noise rises by at most 5.1%, as the paper's FID does",
        verdict=lambda data: told.quality_of(data, "selective"),
    ),
    Claim(
        name="quality-uniform",
        item="comparison",
        text="Uniform decoding at tau 0.5 keeps the quality, too.",
        paper="FID 9.71 to 10.19, 8.22 to 8.26, 15.42 to 15.44",
        holds_if="by the same rule",
        verdict=lambda data: told.quality_of(data, "uniform"),
    ),
    Claim(
        name="worse-above",
        item="tolerance",
        text="Quality is worse for tau above 1.",
        paper="shown by curves",
        holds_if="from tau 0.5 to 2, KID of the same noise rises by more than that",
        verdict=told.worse_above,
    ),
    Claim(
        name="faster-with-tau",
        item="tolerance",
        text="Time falls as tau grows.",
        paper="shown by curves",
        holds_if="a batch takes less at the largest tau than at the smallest",
        verdict=told.faster_with_tau,
    ),
    Claim(
        name="first-guess",
        item="initialisation",
        text="The first guess hardly matters.",
        paper="shown by a plot",
        holds_if="the best speed-up is at most 1.25 times the worst, of the best run of each",
        verdict=told.any_guess,
    ),
    Claim(
        name="memory",
        item="memory",
        text="Selective decoding needs less memory than the cache of sequential decoding.",
        paper="5.2 GB against 7.8 GB",
        holds_if="it peaks lower when no layer keeps a cache; the paper's first layer does",
        verdict=told.less_memory,
    ),
    Claim(
        name="reconstruction",
        item="reconstruction",
        text="Reconstruction at tau 0.5 is near perfect.",
        paper="0.00636, 0.00313 and 0.00122",
        holds_if="mean squared error at most 0.007, selective from zeros",
        verdict=told.reconstructs,
    ),
    Claim(
        name="alike",
        item="samples",
        text="Samples by selective and by sequential decoding look alike.",
        paper="shown by pictures",
        holds_if="they differ by at most 2 grey levels of 255 in the mean",
        verdict=told.looks_alike,
    ),
    Claim(
        name="maf-mnist",
        item="maf-mnist",
        text="A MAF is sampled many times faster if all layers are swept.",
        paper="18.4x",
        holds_if="at least 10 times faster than full passes",
        verdict=told.maf_faster,
    ),
    Claim(
        name="maf-mnist-alike",
        item="maf-mnist",
        text="Digits of the MAF look alike by both decoders.",
        paper="shown by pictures",
        holds_if="99% of pixels are the same at tau 0.5 from zeros",
        verdict=told.digits_alike,
    ),
    Claim(
        name="maf-mnist-cache",
        item="maf-mnist",
        text="Sweeps of the MAF beat sequential decoding with our cache of hidden units.",
        paper="says that a cache does not apply to such networks",
        holds_if="their speed-up is larger",
        verdict=told.maf_beats_cache,
        ours=True,
    ),
    Claim(
        name="maf-ising-faster",
        item="maf-ising",
        text="The MAF of the Ising model is sampled many times faster by sweeps.",
        paper="15.7x",
        holds_if="at least 10 times faster than full passes, of which this kind of flow needs one a site",
        verdict=told.maf_faster,
        models=("ising-maf",),
    ),
    Claim(
        name="maf-ising",
        item="maf-ising",
        text="The physics of samples is the same by both decoders.",
        paper="energies 0.0005 and -0.0003, which are not those of the Ising model",
        holds_if="energies of the same noise, at tau 0.5 from zeros, agree within one standard error",
        verdict=told.ising_same,
    ),
    Claim(
        name="maf-ising-cache",
        item="maf-ising",
        text="Sweeps of the Ising flow beat sequential decoding with our cache.",
        paper="says that a cache does not apply to such networks",
        holds_if="their speed-up is larger",
        verdict=told.maf_beats_cache,
        ours=True,
    ),
    Claim(
        name="generators",
        item="generators",
        text="The flow has a lower FID than DDIM of 20 steps.",
        paper="10.20 against 19.32",
        holds_if="its FID is lower, at the same number of samples",
        verdict=told.beats("DDIM, 20 steps", "fid"),
    ),
    Claim(
        name="generators-gan",
        item="generators",
        text="The flow's FID is close to that of FastGAN.",
        paper="10.20 against 9.67",
        holds_if="it is at most 1.1 times that of FastGAN, at the same number of samples",
        verdict=told.beats("FastGAN", "fid", 1.1),
    ),
    Claim(
        name="generators-speed",
        item="generators",
        text="The flow samples faster than FastGAN.",
        paper="2.63 s against 3.41 s; DDIM 2.31 s",
        holds_if="a batch takes less",
        verdict=told.beats("FastGAN", "seconds"),
    ),
    Claim(
        name="undertrained",
        item="undertrained",
        text="The redundancy is there in models that are not trained to the end: later blocks converge in a "
        "few sweeps.",
        paper="an open question",
        holds_if="at most 8 at the earliest kept checkpoint, all blocks swept at tau 0.5 from zeros",
        verdict=told.early_redundancy,
        ours=True,
    ),
    Claim(
        name="undertrained-first",
        item="undertrained",
        text="The first block stands out in models that are not trained to the end.",
        paper="an open question",
        holds_if="at the earliest kept checkpoint it needs at least twice the sweeps of any other block",
        verdict=told.early_difference,
        ours=True,
    ),
)


def judge_claims(docs: Mapping[str, Docs]) -> list[Doc]:
    """Every claim on every model that it was measured on."""
    found = []
    for claim in CLAIMS:
        models: dict[str, Doc] = {}
        for model, doc in docs.get(claim.item, {}).items():
            if claim.models and model not in claim.models:
                continue
            if "missing" in doc:
                models[model] = {"missing": doc["missing"]}
                continue
            try:
                holds, numbers = claim.verdict(doc["data"])
            except (KeyError, StopIteration, TypeError):  # a run at settings that leave out what it needs
                too_little = f"the run of {claim.item} measured too little to tell"
                models[model] = {"missing": doc.get("lacking", too_little)}
                continue
            models[model] = {"holds": holds, "numbers": numbers}
            doubt = find(docs.get("sweeps", {}).get(model, {}), "data/doubt") if claim.trained else None
            if doubt:
                models[model]["doubt"] = doubt
        found.append(
            {
                "name": claim.name,
                "item": claim.item,
                "text": claim.text,
                "paper": claim.paper,
                "holds_if": claim.holds_if,
                "ours": claim.ours,
                "models": models,
            }
        )
    return found


def verdict_word(entry: Doc) -> str:
    """yes, no, or why not."""
    if "missing" in entry:
        return "not measured"
    holds = find(entry, "holds")
    return "cannot be told" if holds is None else "yes" if holds else "no"
