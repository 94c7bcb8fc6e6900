"""Settings of the whole test run."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["running"]

# Tests run side by side (pytest-xdist); more threads than cores only slow each other down.
torch.set_num_threads(1)

settings.register_profile(
    "default",
    deadline=None,
    max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "30")),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tuned plans go into a folder of the test, not the user's."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(params=["before", "beside", "torch"])
def when(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Weights are read before the work, beside it, or without the compiled functions."""
    if request.param == "torch":
        monkeypatch.setattr("jacobiflow.kernels.build.library", lambda: None)
    if request.param == "beside":
        monkeypatch.setattr("jacobiflow.kernels.checksum.SMALL", 0)
        monkeypatch.setattr("jacobiflow.kernels.checksum.thread_count", lambda: 2)
    return request.param
