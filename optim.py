"""AdamW (arXiv 1711.05101) and the learning rate.

torch's fused AdamW does the arithmetic. It also takes `grad_scale` (gradients are divided by it) and `found_inf` (1
suppresses the update) as tensors on the device, inside its one kernel: so the division by the number of trained tokens,
clipping and the guard against non-finite gradients cost no pass over memory and no synchronisation."""

import math

import torch
from torch import Tensor, nn


def make_optimizer(model: nn.Module, config) -> torch.optim.AdamW:
    """Matrices and embeddings decay; biases and norm weights (one dimension) do not. config: a Config."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=True)


def update(optimizer: torch.optim.AdamW, lr: float, grad_scale: Tensor, suppress: Tensor) -> None:
    """One step with gradients / grad_scale, or none at all where suppress is 1 (fp32 scalars on the device); frees the
    gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.grad_scale, optimizer.found_inf = grad_scale, suppress
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def learning_rate(config, step: int) -> float:
    """The rate of update number `step`, counted from 0; a pure function, so that a resumed run needs no scheduler
    state."""
    warmup, steps = config.warmup, config.steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    length = config.decay_steps * steps if config.decay_steps < 1 else config.decay_steps
    if config.schedule == "wsd":
        length = min(length or 0.2 * steps, steps - warmup)
        begin, end = steps - length, steps
    else:
        begin, end = warmup, length or steps
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    if config.schedule == "constant":
        progress = 0.0
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + (config.lr - config.min_lr) * share
