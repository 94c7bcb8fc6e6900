"""Descriptions: the plain data by which a backend recognizes what it may evaluate in its own way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """The description of a bijector: the name of its formula and the numbers in it, without theta.

    Backends have tables of the formulas that they implement, by name and count of numbers.
    """

    kind: str
    numbers: tuple[float, ...] = ()


def description(thing: object) -> object | None:
    """What `thing.describe()` returns, if the class of `thing` itself defines that method; else None.

    A bijector or conditioner that a backend may evaluate in its own way defines `describe`: bijectors return
    a `Formula`, conditioners a `BoundNetwork` or a `TransformerNetwork`. The method is not inherited: a
    subclass may compute something else, so it runs in torch until it describes itself.

    >>> class Double:
    ...     def describe(self) -> Formula:
    ...         return Formula("scale", (2.0,))
    >>> class Triple(Double): ...
    >>> description(Double()), description(Triple())
    (Formula(kind='scale', numbers=(2.0,)), None)
    """
    describe = vars(type(thing)).get("describe")
    return None if describe is None else describe(thing)
