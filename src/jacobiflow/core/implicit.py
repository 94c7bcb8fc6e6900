"""Gradients through a decoded sample by the implicit function theorem.

The answer x of a block solves x = G(x, z, w), G(x, z, w)_t = f^-1(z_t; theta_t(x_{<t}, w)), whatever
sweeps led to it. So for a loss with gradient g at x
    dloss/d(z, w) = (dG/d(z, w))^T v,   v = g + J^T v,   J = dG/dx.
J is strictly lower triangular: the same sweeps that solved for x solve for v, exactly after T of
them. Only one evaluation of the block is kept in memory, however many sweeps there were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.types import Block


def attach(block: Block, z: Tensor, x: Tensor, log_det: Tensor, *, tol: float) -> tuple[Tensor, Tensor]:
    """x [N, T, D] and log_det [N] as differentiable functions of z and of `block.tensors()`.

    x must solve the block for z: what is left of its error biases the gradients. tol bounds the
    last update of v, relative to the largest entry of v in that sample. First derivatives only.
    """
    out: tuple[Tensor, Tensor] = _Implicit.apply(block, tol, x, log_det, z, *block.tensors())  # type: ignore[no-untyped-call]
    return out


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, block: Block, tol: float, x: Tensor, log_det: Tensor, z: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.block, ctx.tol = block, tol
        ctx.save_for_backward(x, z, *tensors)
        return x.clone(), log_det.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives of decoded samples are not supported; "
                "differentiate flow.encode instead, or drop create_graph=True"
            )
        grad_x, grad_log_det = grads
        x, z, *tensors = ctx.saved_tensors
        block: Block = ctx.block
        wanted = [t for t, need in zip((z, *tensors), ctx.needs_input_grad[4:], strict=True) if need]
        with torch.enable_grad():
            x, z_in = x.detach().requires_grad_(), z.detach().requires_grad_()
            new, slope = block.inverse(z_in, block.params(x, 0, block.length))
            log_det = slope.flatten(1).sum(1)
        leaves = [z_in if t is z else t for t in wanted]
        v = _solve(new, log_det, x, grad_x, grad_log_det, ctx.tol)
        outputs, pulls = [new], [v]
        if log_det.requires_grad:  # that of a mere shift is constant
            outputs, pulls = [new, log_det], [v, grad_log_det]
        found = iter(torch.autograd.grad(outputs, leaves, pulls, allow_unused=True))
        return (None, None, None, None, *(next(found) if need else None for need in ctx.needs_input_grad[4:]))


def _solve(new: Tensor, log_det: Tensor, x: Tensor, g: Tensor, g_log_det: Tensor, tol: float) -> Tensor:
    """v = g' + J^T v by sweeps, g' what reaches x from the loss, log_det's share included."""
    length = x.shape[1]
    if log_det.requires_grad:
        (share,) = torch.autograd.grad(log_det, x, g_log_det, retain_graph=True, allow_unused=True)
        g = g if share is None else g + share
    v = g
    for _ in range(length - 1):
        pulled: Tensor | None = torch.autograd.grad(new, x, v, retain_graph=True, allow_unused=True)[0]
        if pulled is None:
            break
        update, v = (g + pulled - v).flatten(1).abs().amax(1), g + pulled
        scale = v.flatten(1).abs().amax(1)
        if bool(((update <= tol * scale) | ~update.isfinite()).all()):
            break
    return v
