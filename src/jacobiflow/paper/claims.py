"""The paper's claims, each as a measured yes or no on each of our models, with the number behind it.

A claim is a function of an item's JSON; the thresholds stand here and are printed with the claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jacobiflow.paper.item import Doc, Docs, find

Verdict = tuple[bool | None, dict[str, float]]  # None: it cannot be told; the numbers by what they are


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, when we say yes, and how it is told from the data of an item."""

    name: str
    item: str
    text: str
    paper: str  # its own figures
    holds_if: str
    verdict: Callable[[Any], Verdict]


def first_block(data: Any) -> Verdict:
    """Sweeps of the first block against the largest of the others, all swept."""
    first, *others = [layer["mean"] for layer in data["plans"]["uniform, zeros"]["layers"]]
    return first >= 2 * max(others), {"first block": first, "most of the others": max(others)}


def later_blocks(data: Any) -> Verdict:
    """Sweeps of the others in selective decoding."""
    _, *others = [layer["mean"] for layer in data["plans"]["selective, zeros"]["layers"]]
    return max(others) <= 8, {"least": min(others), "most": max(others)}


def bounded(data: Any) -> Verdict:
    """The largest number of sweeps of any sample against the positions."""
    layers = [layer for plan in data["plans"].values() for layer in plan["layers"]]
    worst = max(layers, key=lambda layer: layer["largest"] / layer["bound"])
    positions = worst["bound"] + 1
    return worst["largest"] <= positions, {"most sweeps": worst["largest"], "positions": positions}


def ratio_falls(data: Any) -> Verdict:
    """In how many layers the later half of sweeps gains more than the earlier half."""
    told = [block["ratio_falls"] for block in data["blocks"] if block["ratio_falls"] is not None]
    return (all(told) if told else None), {
        "layers where it falls": sum(told),
        "layers with enough sweeps": len(told),
    }


def first_deviates(data: Any) -> Verdict:
    """The first layer's L2 distance against the largest of the others, o = 5, in the paper's variant."""
    masked = next(m for m in data["masked"] if m["o"] == 5 and m["variant"] == "attention")
    first, *others = [layer["l2"] for layer in masked["layers"]]
    return first > max(others), {"first layer": first, "most of the others": max(others)}


def quality_kept(data: Any) -> Verdict:
    """FID of selective against sequential decoding; KID and its scatter where there is no FID."""
    exact, ours = data["quality"]["sequential"], data["quality"]["selective"]
    if exact["fid"] is None:
        return (
            ours["kid"] - exact["kid"] <= exact["kid_std"],
            {"KID, sequential": exact["kid"], "KID, selective": ours["kid"]},
        )
    rise = ours["fid"] / exact["fid"] - 1
    return rise <= 0.051, {"FID, sequential": exact["fid"], "FID, selective": ours["fid"]}


def worse_above(data: Any) -> Verdict:
    """Quality at the largest tau against tau 0.5."""
    rows = {row["method"]: row["quality"] for row in data["rows"]}
    key = "paired_relative" if rows["0.5"]["fid"] is None else "fid"
    label = "paired distance" if key == "paired_relative" else "FID"
    mild, loose = rows["0.5"][key], rows["2"][key]
    return loose > mild, {f"{label}, tau 0.5": mild, f"{label}, tau 2": loose}


def any_guess(data: Any) -> Verdict:
    """Speed-ups from all first guesses."""
    found = [row["speedup"] for row in data["rows"]]
    return max(found) <= 1.25 * min(found), {"least speed-up": min(found), "most": max(found)}


def less_memory(data: Any) -> Verdict:
    """Sweeps without a cache against sequential decoding with one."""
    peaks = {(p["plan"], p["cache"]): p["peak_mb"] for p in data["peaks"]}
    cache, ours = peaks["sequential", True], peaks["uniform", False]
    return ours < cache, {"MB, sequential with its cache": cache, "MB, sweeps without": ours}


def reconstructs(data: Any) -> Verdict:
    """The mean squared error of selective decoding."""
    mse = data["rows"]["selective"]["mse"]
    return mse <= 0.007, {"mean squared error": mse}


def selective_wins(data: Any) -> Verdict:
    """Speed-ups of selective and uniform decoding at the largest batch that was timed."""
    last = max(row["batch"] for row in data["speed"])
    found = {row["method"]: row["speedup"] for row in data["speed"] if row["batch"] == last}
    ours, uniform = found["selective"], found["uniform"]
    return ours > max(1.0, uniform), {"selective": ours, "uniform": uniform, "batch": last}


def selective_wins_alone(data: Any) -> Verdict:
    """The same at the smallest batch that was timed."""
    first = min(row["batch"] for row in data["speed"])
    found = {row["method"]: row["speedup"] for row in data["speed"] if row["batch"] == first}
    ours, uniform = found["selective"], found["uniform"]
    return ours > max(1.0, uniform), {"selective": ours, "uniform": uniform, "batch": first}


def looks_alike(data: Any) -> Verdict:
    """Mean difference of pictures in grey levels."""
    row = next(row for row in data["rows"] if row["method"] == "selective")
    return row["grey_levels"] <= 2.0, {"grey levels of 255": row["grey_levels"]}


def maf_faster(data: Any) -> Verdict:
    """Sweeps against full passes."""
    found = next(row for row in data["rows"] if row["method"] == "sweeps")
    return found["speedup"] >= 10, {"speed-up": found["speedup"], "largest deviation": found["largest"]}


def ising_same(data: Any) -> Verdict:
    """Energy by sweeps against sequential decoding, in standard errors; beside the exact one."""
    exact, ours = (data["rows"][i]["observed"] for i in (1, 2))
    key = "energy_per_site"
    error = (exact[f"{key}_error"] ** 2 + ours[f"{key}_error"] ** 2) ** 0.5
    return (
        abs(ours[key] - exact[key]) <= 3 * error,
        {"sequential": exact[key], "sweeps": ours[key], "exact": ours["exact_energy_per_site"]},
    )


def early(data: Any) -> Verdict:
    """First block against the others at the earliest checkpoint that was kept."""
    moment = data["moments"][0]
    first, *others = [layer["mean"] for layer in moment["sweeps"]["layers"]]
    return first >= 2 * max(others), {"step": moment["step"], "first block": first, "others": max(others)}


def beats_ddim(data: Any) -> Verdict:
    """FID of the flow against DDIM's."""
    rows = {row["method"]: row["fid"] for row in data["rows"] if "fid" in row}
    ours, theirs = rows["flow, selective"], rows["DDIM, 20 steps"]
    return ours < theirs, {"flow": ours, "DDIM": theirs}


CLAIMS = (
    Claim(
        name="first-block",
        item="sweeps",
        text="The first block needs many more sweeps than the others.",
        paper="shown for AFHQ by curves",
        holds_if="at least twice the sweeps of any other block, all swept at tau 0.5 from zeros",
        verdict=first_block,
    ),
    Claim(
        name="later-blocks",
        item="sweeps",
        text="The later blocks converge in a few sweeps at tau 0.5.",
        paper="3.0 to 7.5, with one exception of 53.9",
        holds_if="at most 8, mean over samples",
        verdict=later_blocks,
    ),
    Claim(
        name="bounded",
        item="sweeps",
        text="There are never more sweeps than positions.",
        paper="proved",
        holds_if="no sample takes more",
        verdict=bounded,
    ),
    Claim(
        name="superlinear",
        item="convergence",
        text="The ratio of successive errors falls as sweeps converge.",
        paper="proved near the answer",
        holds_if="in every layer with enough sweeps, the later half gains more a sweep than the earlier half",
        verdict=ratio_falls,
    ),
    Claim(
        name="first-layer-deviates",
        item="similarity",
        text="The first layer suffers most from masked dependencies.",
        paper="shown for CIFAR-100 and AFHQ by curves",
        holds_if="o = 5, attention masked: its L2 distance is the largest",
        verdict=first_deviates,
    ),
    Claim(
        name="faster",
        item="comparison",
        text="At the largest batch timed, selective decoding beats sequential and uniform decoding.",
        paper="3.6x, 4.7x and 4.5x at batch 256 on GPUs; uniform 2.4x, 2.9x and 0.8x",
        holds_if="its speed-up is above 1 and above uniform's",
        verdict=selective_wins,
    ),
    Claim(
        name="faster-alone",
        item="comparison",
        text="At the smallest batch timed, selective decoding beats sequential and uniform decoding.",
        paper="not measured",
        holds_if="its speed-up is above 1 and above uniform's",
        verdict=selective_wins_alone,
    ),
    Claim(
        name="quality",
        item="comparison",
        text="Quality at tau 0.5 is within a small degradation of sequential decoding.",
        paper="FID 9.71 to 10.20 (5%), 8.22 to 8.19, 15.42 to 15.44",
        holds_if="FID rises by at most 5.1%; without FID, KID by at most its scatter over subsets",
        verdict=quality_kept,
    ),
    Claim(
        name="worse-above",
        item="tolerance",
        text="Quality is worse for tau above 1.",
        paper="shown by curves",
        holds_if="FID (else the paired distance) at tau 2 is above that at 0.5",
        verdict=worse_above,
    ),
    Claim(
        name="first-guess",
        item="initialisation",
        text="The first guess hardly matters.",
        paper="shown by bars",
        holds_if="the best speed-up is at most 1.25 times the worst",
        verdict=any_guess,
    ),
    Claim(
        name="memory",
        item="memory",
        text="Sweeps need less memory than the cache of sequential decoding.",
        paper="5.2 GB against 7.8 GB",
        holds_if="sweeps without a cache peak lower",
        verdict=less_memory,
    ),
    Claim(
        name="reconstruction",
        item="reconstruction",
        text="Reconstruction at tau 0.5 is near perfect.",
        paper="0.00636, 0.00313 and 0.00122",
        holds_if="mean squared error at most 0.007",
        verdict=reconstructs,
    ),
    Claim(
        name="alike",
        item="samples",
        text="Samples by selective and by sequential decoding look alike.",
        paper="shown by pictures",
        holds_if="they differ by at most 2 grey levels of 255 in the mean",
        verdict=looks_alike,
    ),
    Claim(
        name="maf-mnist",
        item="maf-mnist",
        text="A MAF is sampled many times faster if all layers are swept.",
        paper="18.4x",
        holds_if="at least 10 times faster than full passes",
        verdict=maf_faster,
    ),
    Claim(
        name="maf-ising",
        item="maf-ising",
        text="The physics of samples is the same by both decoders.",
        paper="energies 0.0005 and -0.0003, which are not those of the Ising model",
        holds_if="energies agree within 3 standard errors",
        verdict=ising_same,
    ),
    Claim(
        name="generators",
        item="generators",
        text="The flow has a lower FID than DDIM of 20 steps.",
        paper="10.20 against 19.32; FastGAN 9.67",
        holds_if="its FID is lower, at the same number of samples",
        verdict=beats_ddim,
    ),
    Claim(
        name="undertrained",
        item="undertrained",
        text="The redundancy is there in models that are not trained to the end.",
        paper="an open question",
        holds_if="at the earliest kept checkpoint the first block needs twice the sweeps of any other",
        verdict=early,
    ),
)


def judge_claims(docs: Mapping[str, Docs]) -> list[Doc]:
    """Every claim on every model that it was measured on."""
    found = []
    for claim in CLAIMS:
        models: dict[str, Doc] = {}
        for model, doc in docs.get(claim.item, {}).items():
            if "missing" in doc:
                models[model] = {"missing": doc["missing"]}
                continue
            try:
                holds, numbers = claim.verdict(doc["data"])
            except (KeyError, StopIteration, TypeError):  # a run at settings that leave out what it needs
                models[model] = {"missing": f"the run of {claim.item} measured too little to tell"}
                continue
            models[model] = {"holds": holds, "numbers": numbers}
        found.append(
            {
                "name": claim.name,
                "item": claim.item,
                "text": claim.text,
                "paper": claim.paper,
                "holds_if": claim.holds_if,
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
