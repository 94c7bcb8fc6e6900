"""The paper's claims, judged by the rules of `claims.toml`.

A rule is a list of tests [left, right, margin]. A test holds if left is below right by more than the margin,
fails if it is above by more than the margin, and cannot be told otherwise. A claim holds if all its tests
hold, and does not hold if one fails. Tests about numbers that were not measured are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jacobiflow.core.records import build
from jacobiflow_lab.paper.paper_items import read_toml
from jacobiflow_lab.paper.schema import Doc, Docs, fill, find

Numbers = dict[str, Any]
Term = float | str | list[Any]  # a number, the name of one, [factor, term] or [term, "+", term]
Test = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """An entry of `claims.toml`: what the paper says, the rule, the paper's own numbers, the reason."""

    name: str
    item: str
    text: str
    paper: str  # what it prints
    holds_if: str  # the rule in words
    limit: float = 1.0
    numbers: dict[str, str]  # places in the data of the item, by name
    headline: list[str] = field(default_factory=list)  # the numbers of the summary
    tests: list[list[Term]]
    needs: str = ""  # a number without which nothing can be told
    reason: str  # a template: why it does not hold, with places in the data
    printed: tuple[Numbers, ...] = ()  # the paper's own numbers, which pass the rule
    unprinted: str = ""  # why there are none
    section: str = ""  # of the page; default: the item's
    ours: bool = False  # not a claim of the paper: a question it leaves open, or one about our code
    models: tuple[str, ...] = ()  # that it is about; (): all of the item's

    def outcomes(self, numbers: Numbers) -> list[Test]:
        """The tests, as far as the numbers are there."""
        known = numbers | {"limit": self.limit, "1 / limit": 1 / self.limit}
        every = [tuple(term(one, known) for one in test) for test in self.tests]
        return [(a, b, margin) for a, b, margin in every if None not in (a, b, margin)]  # type: ignore[misc]

    def decide(self, numbers: Numbers) -> bool | None:
        """Whether the claim holds; None: it cannot be told."""
        return None if self.needs and not numbers[self.needs] else decide(self.outcomes(numbers))


def term(one: Term, numbers: Numbers) -> float | None:
    """The value of a term; None if a number of it is not there.

    >>> term([2, "a"], {"a": 3.0}), term(["a", "+", "a"], {"a": 3.0}), term("b", {})
    (6.0, 6.0, None)
    """
    if isinstance(one, list):
        left, right = term(one[0], numbers), term(one[-1], numbers)
        return None if left is None or right is None else left + right if "+" in one else left * right
    return numbers.get(one) if isinstance(one, str) else one


def decide(tests: list[Test]) -> bool | None:
    """Whether all tests hold; None: it cannot be told.

    >>> decide([(1.0, 2.0, 0.5)]), decide([(1.0, 2.0, 0.5), (3.0, 2.0, 0.5)]), decide([(1.0, 1.2, 0.5)])
    (True, False, None)
    """
    outcomes = [True if a < b - margin else False if a >= b + margin else None for a, b, margin in tests]
    if False in outcomes:
        return False
    return None if None in outcomes or not outcomes else True


def why_open(tests: list[Test]) -> str:
    """Why the tests decide nothing."""
    close = [(a, b, margin) for a, b, margin in tests if abs(a - b) <= margin]
    if not close:
        return "What was measured has too little to decide it."
    a, b, margin = close[0]
    text = f"{a:.4g} and {b:.4g} are closer than the uncertainty of {margin:.2g} at this sample size."
    times = (margin / abs(a - b)) ** 2 if a != b else float("inf")
    return text + (f" About {times:.0f} times as many samples would decide it." if 2 <= times < 1000 else "")


def judge_claims(docs: Mapping[str, Docs]) -> list[Doc]:
    """Every claim on every model that it was measured on."""
    described = ("name", "item", "text", "paper", "holds_if", "ours", "headline")
    found = []
    for claim in CLAIMS:
        rows = docs.get(claim.item, {})
        models = {m: judge(claim, doc) for m, doc in rows.items() if not claim.models or m in claim.models}
        about = {key: getattr(claim, key) for key in described} | {"section": claim.section or claim.item}
        found.append(about | {"models": models})
    return found


def judge(claim: Claim, doc: Doc) -> Doc:
    """One claim on one model."""
    if "missing" in doc:
        return {"missing": doc["missing"]}
    found = {name: find(doc["data"], place) for name, place in claim.numbers.items()}
    numbers = {name: value for name, value in found.items() if value is not None}
    tests = claim.outcomes(numbers)
    if not tests or (claim.needs and claim.needs not in numbers):
        return {"missing": doc.get("lacking", f"the run of {claim.item} measured too little to decide")}
    holds = claim.decide(numbers)
    reason = "" if holds else why_open(tests) if holds is None else fill(claim.reason, doc["data"])
    return {"holds": holds, "numbers": numbers, "reason": reason}


def verdict_word(entry: Doc | None) -> str:
    """holds, does not hold, cannot be told or not measured."""
    if not entry or "missing" in entry:
        return "not measured"
    return {True: "holds", False: "does not hold", None: "cannot be told"}[entry["holds"]]


CLAIMS = [
    build(Claim, fields | {"name": name, "holds_if": fields["holds_if"].format(limit=fields.get("limit"))}, name)
    for name, fields in read_toml("claims.toml").items()
]
