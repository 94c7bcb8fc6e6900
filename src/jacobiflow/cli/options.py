"""What several commands share: options, parsing, checks, and how they print."""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_origin

import torch
import tyro

from jacobiflow.core import records
from jacobiflow.core.arguments import as_int
from jacobiflow.core.files import write_text
from jacobiflow.core.method import Init
from jacobiflow.core.progress import note
from jacobiflow.core.tables import terminal_width
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.checks import describe
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.plans import SWEPT
from jacobiflow.kernels.backend import Backend

T = TypeVar("T")
# Flags that are off need no opposite, and groups of options no prefix; those of a recipe have both.
MARKS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)

# Options of several commands
arg = tyro.conf.arg
Model = Annotated[
    tyro.conf.Positional[str], arg(metavar="MODEL", help="A bundled name, a checkpoint folder or a hub id.")
]
Count = Annotated[int, arg(metavar="N")]
Number = Annotated[int | None, arg(metavar="N")]
Bound = Annotated[float | None, arg(metavar="BOUND")]
Folder = Annotated[Path, arg(metavar="FOLDER")]
Force = Annotated[bool, arg(help="Replace files of an earlier run.")]
Device = Annotated[str, arg(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, ...")]
Seed = Annotated[int, arg(metavar="SEED", help="Seed of the noise. Sample i depends on (seed, i) only.")]
Json = Annotated[bool, arg(help="Print JSON instead of text.")]


@dataclass(frozen=True, kw_only=True)
class FlowOptions:
    """Which flow, and where it runs."""

    model: Model
    labels: Annotated[str | None, arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9, 1,3,5-7 or cat,dog. Default: no label."""
    device: Device = "auto"
    threads: Number = None  # CPU threads. Default: torch's own; 1 in a large job.

    def find_device(self) -> torch.device:
        """The device, after setting --threads; raises if either cannot be used."""
        if self.threads is not None:
            torch.set_num_threads(as_int("--threads", self.threads, 1, 1024))
        return pick_device(self.device)

    def load(self, instead: str) -> Flow:
        """The flow on its device; `instead` names what flows with context can be used with."""
        flow = load(self.model, device=self.find_device())
        refuse_context(flow, instead)
        return flow


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """How noise is drawn and decoded."""

    tol: Annotated[float | None, arg(metavar="TOL")] = None  # Largest change in the last sweep. Default: the model's.
    init: Annotated[Init | None, arg(metavar="INIT")] = None
    """First guess: zeros, noise, previous or calibrated. Default: the model's own."""
    max_deviation: Bound = None  # Plan auto: largest deviation from exact. Default: the model's own.
    seed: Seed = 0
    backend: Annotated[Backend | None, arg(metavar="BACKEND")] = None
    """torch, c or compile. Default: the fastest that supports the model."""

    @property
    def default_plan(self) -> str:
        """The plan where none is given."""
        return "auto" if self.tol is None and self.init is None else "selective"

    def check(self, plans: Sequence[str]) -> None:
        """Raise if --seed is negative, or --tol and --init do not apply to the plans."""
        as_int("--seed", self.seed)
        if self.max_deviation is not None and "auto" not in plans:
            raise ValueError("--max-deviation is for plan auto: leave it out, or leave out --plan")
        own = next((plan for plan in plans if plan not in ("sequential", *SWEPT)), None)
        if self.default_plan != "auto" and (own or not set(plans) & set(SWEPT)):
            why = f"{own} carries its own" if own else "sequential decoding is exact"
            raise ValueError(f"--tol and --init are for {' and '.join(SWEPT)}; {why}")

    def of_plan(self, plan: str) -> dict[str, Any]:
        """The options of `flow.plan` that belong to this plan."""
        if plan == "auto":
            return {"max_deviation": self.max_deviation}
        return {"tol": self.tol, "init": self.init} if plan in SWEPT else {}


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Guidance towards the labels."""

    guidance: Annotated[float, arg(metavar="WEIGHT")] = 0.0  # Weight of guidance; 0: none.
    guide: Literal["a", "b", "ab"] = "ab"  # What guidance acts on: log-scale, shift or both.
    annealed: bool = False  # Let guidance grow along the sequence.
    attn_temp: Annotated[float, arg(metavar="TEMP")] = 1.0  # Attention temperature of the unconditional branch.

    def for_flow(self, flow: Flow, labels: str | None, backend: Backend | None = None) -> Guidance:
        """Guidance as the flow takes it; raises if it is not supported there, or changes nothing."""
        if not self.guidance and self != GuidanceOptions():
            raise ValueError("--guide, --annealed and --attn-temp change nothing alone: add --guidance 1.5")
        guidance = Guidance(self.guidance, annealed=self.annealed, what=self.guide, attn_temp=self.attn_temp)
        with torch.no_grad():
            flow.bound_blocks(1, guidance=guidance, backend=backend)
        fix = "add --labels or --attn-temp 1.5" if flow.num_classes else "add --attn-temp 1.5"
        guidance.refuse_idle(None if labels in (None, "none") else 0, fix)
        return guidance


def parse(kind: type[T], args: Sequence[str], *, command: str, default: T | None = None) -> T:
    """The options of one command; --help prints them and ends the program. A mistake raises ValueError."""
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands, *(MARKS if default is None else ()))}
    options |= {"prog": f"jacobiflow {command}", "description": inspect.getdoc(get_origin(kind) or kind)}
    options |= {} if default is None else {"default": default}
    said, wrong = StringIO(), StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(wrong):
            return cast(T, tyro.cli(kind, args=list(args), **options))
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"{_in_one_line(wrong.getvalue())}; see jacobiflow {command} --help") from None
        print(_tidy(said.getvalue(), off="None" if default else "False"))
        raise


def _in_one_line(box: str) -> str:
    """What tyro says of a mistake, in parts between rules that name options in lines of their own."""
    _title, first, *others = re.split(r"\n *-{3,} *\n", box)
    said, name_line = " ".join(first.split()), re.compile(r"^ {6}([^\s,]+)", re.MULTILINE)
    if said.startswith("Missing from"):
        return f"missing: {' and '.join(name_line.findall(first))}"
    if found := re.match(r"Unrecognized options: ([^,]+)", said):
        like = next((part for part in others if re.search(f"Perhaps|to {re.escape(found[1])}:", part)), "")
        hint = f" (did you mean {' or '.join(name_line.findall(like))}?)" if like else ""
        return f"{found[1]} is not an option{hint}"
    if found := re.match(r"invalid choice ('.*?') for argument '(.*?)'.*?\((.*?)\)", said):
        known = sorted(set(re.findall("'(.*?)'", found[3])) - {"None"})
        return f"{found[2]} must be one of {', '.join(known)}, not {found[1]}"
    if found := re.match("Missing value for argument '(.*?)'", said):
        return f"{found[1]} needs a value"
    if found := re.match(r"Error parsing ([^\s/:]+).*?('[^']*')\]?(\.| |$)", said):
        kind = "a whole number" if "int" in said else "a number" if "float" in said else "as --help says"
        return f"{found[1]} must be {kind}, not {found[2]}"
    return re.sub(r"^Error parsing \w+: ", "", said)


def _tidy(text: str, off: str) -> str:
    """The help without defaults that say nothing (None, '' and `off`) and second names, wrapped to the terminal."""
    text = re.sub(rf"\s*\(default:\s*(None|''|{off})?\)", "", text)  # tyro may break it into two lines
    text = re.sub(r"-(\w) (\S+), --\1 \2", lambda found: found[0].partition(",")[0].ljust(len(found[0])), text)
    lines = (textwrap.fill(line, terminal_width(), break_on_hyphens=False) for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def label_cycle(text: str | None, classes: int, names: Sequence[str] = ()) -> tuple[int, ...]:
    """The labels that samples take in turn; None and "none" are no labels. names: of the classes, where known.

    >>> label_cycle("0-2,dog", 8, [*"abcdefg", "dog"])
    (0, 1, 2, 7)
    """
    if text is None or text == "none":
        return ()
    if not classes:
        raise ValueError("this model takes no labels: leave --labels out")
    labels = list[int]()
    for part in map(str.strip, text.split(",")):
        found = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", part)
        if part in names:
            low = high = list(names).index(part)
            if found is not None and part != str(low):  # folders 0 .. 10: the third class is called 10
                ways = f"{low}-{low} for the class, {found[1]}-{found[1]} for the number"
                raise ValueError(f"--labels {part} may mean a number or the class of that name: give {ways}")
        elif found is None:
            known = f"names ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''}), " if names else ""
            raise ValueError(f"--labels takes {known}numbers and ranges such as 0-9 or 1,3,5-7, not {text!r}")
        else:
            low, high = int(found[1]), int(found[2] or found[1])
            if high < low or high >= classes:
                raise ValueError(f"--labels {part} is outside 0-{classes - 1}")
        labels += range(low, high + 1)
    return tuple(labels)


def pick_device(name: str) -> torch.device:
    """A device by name, checked by using it; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wrong = f"must be auto, cpu, cuda, cuda:1 or the like, not {name!r}"
    try:
        device = torch.device(name)
        wrong = f"{name}: this torch sees no such device"
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):  # device types raise different errors
        raise ValueError(f"--device {wrong}") from None
    return device


def make_folder(path: Path, files: Sequence[str] = (), *, force: bool = True) -> None:
    """Make the folder `path`, which can be written to and has none of `files` unless `force` is given."""
    old = [name for name in files if (path / name).exists()]
    if old and not force:
        raise ValueError(f"{path} has {' and '.join(old)}: add --force to replace, or choose another name")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        wrong = "is a file: give a folder" if path.is_file() else f"cannot be made: {error.strerror}"
        raise ValueError(f"{path} {wrong}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{path} cannot be written to: choose another")


def refuse_context(flow: Flow, instead: str) -> None:
    """Raise for flows with context, which can be used in Python only."""
    if flow.context_features:
        raise ValueError(f"this flow needs context, which the command line cannot give; use {instead} in Python")


def report(doc: dict[str, Any], text: str, *, as_json: bool, file: Path | None = None) -> None:
    """Print `text` for people or `doc` for programs; `file` gets `doc` in either case."""
    plain = json.dumps(records.as_json(doc), indent=2, allow_nan=False)
    if file is not None:
        write_text(file, f"{plain}\n")
    print(plain if as_json else text)


def exit_status(command: str, nonfinite: int, n: int, advice: str) -> int:
    """1, and a line that says why, if samples are not finite; else 0."""
    if nonfinite:
        note(f"jacobiflow {command}: {describe(nonfinite, n, advice)}")
    return int(nonfinite > 0)
