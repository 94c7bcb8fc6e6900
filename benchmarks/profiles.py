"""Measure the convergence profiles of bundled models again: `python -m benchmarks.profiles mnist-small`.

A model without first guesses gets them before. Profiles count sweeps and deviations, which do not depend on other
programs. Cells in mixed precision need a processor with instructions for bfloat16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jacobiflow as jf
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.profile import measure_profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=bundled_names(), help="of bundled models; default: all")
    parser.add_argument("--out", type=Path, default=Path("models/src/jacobiflow_models"))
    args = parser.parse_args()
    for name in args.names:
        flow = jf.load(name)
        if flow.guesses() is None:
            calibrate(flow)
            assert flow.calibration is not None
            flow.calibration.save(args.out / name)
        measure_profile(flow, progress=lambda text, name=name: print(f"{name}: {text}", flush=True))
        assert flow.profile is not None
        flow.profile.save(args.out / name)


if __name__ == "__main__":
    main()
