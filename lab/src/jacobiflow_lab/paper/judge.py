"""Judges the claims: a measured yes or no on each model, with the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping

from jacobiflow_lab.paper.claims import CLAIMS, Claim
from jacobiflow_lab.paper.schema import Doc, Docs


def judge_claims(docs: Mapping[str, Docs]) -> list[Doc]:
    """Every claim on every model that it was measured on."""
    described = ("name", "item", "text", "paper", "holds_if", "ours")
    found = []
    for claim in CLAIMS:
        rows = docs.get(claim.item, {})
        models = {m: judge(claim, doc) for m, doc in rows.items() if not claim.models or m in claim.models}
        found.append({key: getattr(claim, key) for key in described} | {"models": models})
    return found


def judge(claim: Claim, doc: Doc) -> Doc:
    """One claim on one model."""
    if "missing" in doc:
        return {"missing": doc["missing"]}
    try:
        holds, numbers = claim.rule(doc["data"])
    except (KeyError, StopIteration, TypeError):  # the settings of the run left out what the rule needs
        return {"missing": doc.get("lacking", f"the run of {claim.item} measured too little to decide")}
    return {"holds": holds, "numbers": numbers}


def verdict_word(entry: Doc | None) -> str:
    """yes, no, undecided or not measured."""
    if not entry or "missing" in entry:
        return "not measured"
    return {True: "yes", False: "no", None: "undecided"}[entry["holds"]]
