"""Gradients through a decoded sample by the implicit function theorem.

The answer x of a block solves x = G(x, z, w), G(x, z, w)_t = f^-1(z_t; theta_t(x_{<t}, w)). So for a loss with
gradient g at x
    dloss/d(z, w) = (dG/d(z, w))^T v,   v = g + J^T v,   J = dG/dx.
J is strictly lower triangular: sweeps solve for v as they did for x, exactly after T of them. Only one evaluation of
the block is kept in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block


def attach(block: Block, z: Tensor, x: Tensor, log_det: Tensor, *, tol: float) -> tuple[Tensor, Tensor]:
    """x [N, T, D] and log_det [N] as functions of z and the conditioner's tensors: first derivatives only.

    x must solve the block for z: what is left of its error biases the gradients. tol bounds the last update of v,
    relative to the largest entry of v in that sample. Weights replaced before the backward pass are an error. The loss
    may leave out samples that are not finite.
    """
    tensors = block.conditioner.tensors()
    return _Implicit.apply(block, tol, x, log_det, z, *tensors)  # type: ignore[no-any-return, no-untyped-call]


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: Block, tol: float, x: Tensor, log_det: Tensor, z: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.block, ctx.tol = block, tol
        # Saved as well, so that autograd notices writes; what it hands back may be other tensors than the block's.
        ctx.tensors, ctx.places = tensors, [t.data_ptr() for t in tensors]
        ctx.save_for_backward(x, z, *tensors)
        return x.clone(), log_det.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            advice = "differentiate flow.encode instead, or drop create_graph=True"
            raise RuntimeError(f"second derivatives of decoded samples are not supported; {advice}")
        x, z, *_ = ctx.saved_tensors
        now = ctx.block.conditioner.tensors()
        if list(map(id, now)) != list(map(id, ctx.tensors)) or [t.data_ptr() for t in now] != ctx.places:
            advice = "call backward before they change, or sample again"
            raise RuntimeError(f"weights were replaced between sampling and the backward pass: {advice}")
        grad_x, grad_log_det = grads
        if bool((lost := ~x.isfinite().flatten(1).all(1)).any()):
            # Samples that the loss leaves out are replaced by a point where 0 stays 0.
            where = (lost & (grad_x == 0).flatten(1).all(1) & (grad_log_det == 0))[:, None, None]
            x, z = x.masked_fill(where, 0), z.masked_fill(where, 0)
        with torch.enable_grad():
            x, z = x.detach().requires_grad_(), z.detach().requires_grad_()
            new, log_det = ctx.block.sweep(x, z)
        needed = ctx.needs_input_grad[4:]
        leaves = [t for t, need in zip((z, *ctx.tensors), needed, strict=True) if need]
        v = _solve(new, log_det, x, grad_x, grad_log_det, ctx.tol)
        count = 1 + log_det.requires_grad  # that of a mere shift is constant
        found = iter(torch.autograd.grad([new, log_det][:count], leaves, [v, grad_log_det][:count], allow_unused=True))
        return (None, None, None, None, *(next(found) if need else None for need in needed))


def _solve(new: Tensor, log_det: Tensor, x: Tensor, g: Tensor, g_log_det: Tensor, tol: float) -> Tensor:
    """v = g' + J^T v by sweeps, g' what reaches x from the loss, log_det's share included."""
    if log_det.requires_grad:
        g = g + torch.autograd.grad(log_det, x, g_log_det, retain_graph=True, materialize_grads=True)[0]
    v = g
    for _ in range(x.shape[1] - 1):
        (pulled,) = torch.autograd.grad(new, x, v, retain_graph=True, materialize_grads=True)
        update, v = (g + pulled - v).flatten(1).abs().amax(1), g + pulled
        if bool(((update <= tol * v.flatten(1).abs().amax(1)) | ~update.isfinite()).all()):
            break
    return v
