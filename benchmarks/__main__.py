"""`make bench`: all tables, or the sections that ARGS names, into docs/bench.

    make bench ARGS="tarflow maf-1 --repeats 9"

Each section writes its JSON; one that is not run keeps the JSON that it has. The Markdown, the plots and
the tables of docs/performance.md are made anew from all of them; `--tables` does only that. A name like
"ladder" stands for all sections that begin with it. Programs have options and records of their own:
    make bench ARGS="mnist_quality --data mnist.npz"
"""

from __future__ import annotations

import argparse
import runpy
import sys
from functools import partial
from pathlib import Path

from benchmarks import auto, compiled, goals, ladder, maf, memory, operators, roads, shares, tarflow, training, weights
from benchmarks.harness import REPEATS, ROOT, Section, record, write_tables

SECTIONS = {
    "tarflow": Section("TarFlow `mnist` against the plain sequential loop", tarflow.table),
    "guided": Section("TarFlow `mnist`, sequential decoding with guidance", tarflow.guided),
    "batch": Section("TarFlow `mnist-small`, time against batch", tarflow.batches),
    "length": Section("TarFlow of width 128, four samples, time against sequence length", tarflow.lengths),
    "maf-1": Section("`mnist-maf`, one sample, against nflows", partial(maf.nflows_rows, n=1)),
    "maf-100": Section("`mnist-maf`, 100 samples, against nflows", partial(maf.nflows_rows, n=100)),
    "zuko-maf": Section("zuko MAF, 128 features, 1000 samples", partial(maf.zuko_rows, kind="MAF")),
    "zuko-nsf": Section("zuko NSF, 128 features, 1000 samples", partial(maf.zuko_rows, kind="NSF")),
    "auto": Section('plan="auto" against the best named plan within the deviation', auto.rows),
    "series": Section("network evaluations in series, one sample", auto.series),
    "guesses": Section("whole sweeps until the error is at most 0.05, by first guess", auto.guesses),
    "memory": Section("peak memory of decoding", memory.rows),
    "operators": Section("where the time goes", operators.rows),
    "shares": Section("where sequential decoding spends its time in the C kernels", shares.rows),
    "compile": Section("the backends: torch.compile against the C kernels and plain torch", compiled.rows),
    "training": Section("a training step on this processor", training.rows),
    "weights": Section("looking at every byte of the weights in each call", weights.rows),
    "roads": Section("other roads, against our own decoding of the same block", roads.rows),
    **ladder.sections(),
    "goals": Section("goals, what is reached, and the bound of the machine", goals.rows),
}
PAGES = ("docs/performance.md", "docs/training.md", "README.md")  # that show tables
# Programs with options and records of their own: a module of this folder with `main()`.
PROGRAMS = ("accelerate", "ising", "mnist_quality", "bundle", "profiles", "kernels", "regimes")


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in PROGRAMS:
        sys.argv = sys.argv[1:]
        runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join((*SECTIONS, *PROGRAMS)))
    parser.add_argument("--repeats", type=int, default=REPEATS, help="alternating runs a median")
    parser.add_argument("--model", default="mnist", help="a bundled name or a checkpoint, for the ladder")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/bench")
    args = parser.parse_args()
    known = SECTIONS | ladder.sections(args.model)
    groups = {name: [s for s in known if s.startswith(f"{name}-")] for name in args.sections}
    asked = {name: [name] if name in known else found for name, found in groups.items()}
    unknown = [name for name, found in asked.items() if not found]
    if unknown or args.repeats < 1:
        parser.error(f"no section is called {unknown[0]}" if unknown else "--repeats must be 1 or more")
    for name in () if args.tables else [s for found in asked.values() for s in found] or known:
        record(name, known[name], args.repeats, args.out, f'make bench ARGS="{name}"')
    own = args.out.resolve() == (ROOT / "docs/bench").resolve()
    write_tables(args.out, [ROOT / page for page in PAGES] if own else [])


if __name__ == "__main__":
    main()
