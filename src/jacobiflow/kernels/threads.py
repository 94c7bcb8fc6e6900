"""Threads of torch's operators and of the C kernels."""

from jacobiflow.kernels.native import alone as torch_single_threaded

__all__ = ["torch_single_threaded"]
