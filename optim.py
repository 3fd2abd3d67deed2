"""What happens to the gradients of a step: their sums over the ranks, AdamW (arXiv 1711.05101) or Muon (arXiv
2502.16982); and the learning rate.

Gradients are sums over the trained tokens. One all-reduce per step adds up the loss, the squared norm and the token
count over the ranks. train.py's `train_step` computes the mean, the norm, the clipping and the decision to skip from
these sums; all of them stay on the device.

If parameters and moments are fp32, torch's fused AdamW does the arithmetic. Its one kernel also divides gradients by
`grad_scale` and skips the update if `found_inf` is 1; both are tensors on the device. So the division by the
number of trained tokens, clipping and the guard against non-finite gradients cost no pass over memory, except for the
norm, and no synchronisation. The kernel refuses other dtypes: bf16 moments and bf16 masters are updated by our own
function in fp32 arithmetic, on flat pieces of the parameters, compiled to one pass over memory if there is a compiler.

An update is often smaller than half of bf16's spacing at the parameter, so rounding to nearest would lose it
in every step; the second moment would be lost the same way if beta2 is close to 1. Both are rounded stochastically: up
with the probability that keeps the mean (arXiv 2010.06192). The random bits are a hash of (seed, step, parameter,
position): a resumed run repeats them, and replicas, which must stay equal, draw the same."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw

from lib import torch_private
from lib.parts import is_sharded, local, local_start

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
PIECE = {"eager": 2**18, "compiled": 2**30}  # elements: temporaries that fit in a cache; 32-bit indices


class Settings(Protocol):
    """The fields of config.Config that the optimizers read. This file does not import Config."""

    optimizer: str
    dtype: str
    state_dtype: str
    compile: str
    seed: int
    lr: float
    min_lr: float
    embed_lr: float
    warmup: int  # steps
    steps: int
    schedule: str
    decay_steps: float  # below 1: a share of the steps
    weight_decay: float
    beta1: float
    beta2: float


class Gradients:
    """The gradients of a step on this rank: sums over its trained tokens. Nothing here makes the host wait."""

    def __init__(
        self,
        parameters: list[Tensor],
        clip: float = 0.0,
        group: dist.ProcessGroup | None = None,
        replicas: int = 1,
        limit: int = 1,
    ):
        """clip: largest norm; 0 = no clipping. group: all ranks, on the gradients' device; None: one process.
        replicas: copies of each parameter among the ranks. limit: after so many skipped updates in a row, all later
        ones are skipped."""
        self.parameters, self.clip, self.group, self.replicas, self.limit = parameters, clip, group, replicas, limit
        self.device = local(parameters[0]).device  # the host, if they are offloaded
        self.skipped_in_row = torch.zeros((), device=self.device)
        self.local_loss = self.skipped_in_row

    def norms(self) -> Sequence[Tensor]:
        """The norms of pieces of the parameters' gradients."""
        gradients = [local(p.grad).reshape(-1) for p in self.parameters]
        # On a CPU torch adds one value after the other; in fp32 the norm of 10 M values is then wrong by 3e-4.
        length = 2**17 if self.device.type == "cpu" else 2**30
        pieces = [piece for g in gradients for piece in g.split(length)]
        return torch_private.norms(pieces, dtype=torch.float32)

    def global_sums(self, local_loss: Tensor, local_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """local_loss: this rank's loss, summed over its local_tokens trained tokens -> (loss, trained tokens, squared
        norm of the gradients), summed over all ranks with one all-reduce: fp32 scalars on the gradients' device. All
        ranks must call."""
        self.local_loss = local_loss.to(self.device)
        squared_norm = torch.stack(self.norms()).square().sum() / self.replicas
        sums = torch.stack((self.local_loss, torch.full_like(self.local_loss, local_tokens), squared_norm))
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums.unbind()

    def skip(self, bad: Tensor) -> Tensor:
        """bad: whether this step's loss or norm is not finite -> 1.0 if its update must be skipped, else 0.0, equal on
        all ranks. After `limit` skipped updates in a row all later ones are skipped, too: the host, which reads the
        count one step late, finds the state before them."""
        skips = bad | (self.skipped_in_row >= self.limit)
        self.skipped_in_row = (self.skipped_in_row + 1) * skips
        return skips.float()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def state_layout(model: nn.Module, config: Settings) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """The optimizer's state for each trained parameter, except its number of updates: state name -> (shape, dtype).
    A state of its parameter's shape is sharded as the parameter is."""
    dtype, muon = DTYPES[config.state_dtype], matrices(model) if config.optimizer == "muon" else {}
    return {
        name: {kind: (p.shape, dtype) for kind in (("momentum_buffer",) if p in muon else MOMENTS)}
        for name, p in trainable_parameters(model).items()
    }


def make_optimizer(model: nn.Module, config: Settings) -> "Optimizer":
    """AdamW, or, with --optimizer muon, Muon for the blocks' matrices and AdamW for the rest. Embeddings may have a
    rate of their own. Matrices and embeddings decay; biases and norm weights (one dimension) do not."""
    muon = matrices(model) if config.optimizer == "muon" else {}
    decay, scale = config.weight_decay, (config.embed_lr or config.lr) / config.lr
    embeddings, others, vectors = groups = [
        {"params": [], "weight_decay": decay, "scale": scale},
        {"params": [], "weight_decay": decay},
        {"params": [], "weight_decay": 0.0},
    ]
    for name, p in trainable_parameters(model).items():
        group = embeddings if name.startswith("embed_") else others if p.ndim >= 2 else vectors
        if p not in muon:
            group["params"].append(p)
    assert config.optimizer in ("adamw", "muon"), config.optimizer
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": 1e-8}
    adamw = AdamW([options | group for group in groups], config)
    return Muon(muon, adamw, config) if muon else adamw


class Optimizer:
    """What a run needs of torch.optim.Optimizer, which imports the compiler: that takes a second and 60 MB. `update`
    sets the learning rates, then calls step(grad_divisor, skip): gradients / grad_divisor change the parameters, unless
    skip is 1.0 (both are scalars on the device)."""

    def __init__(self, groups: list[dict], state_dtype: torch.dtype):
        self.param_groups, self.state, self.state_dtype = groups, defaultdict(dict), state_dtype

    def state_of(self, p: Tensor, *kinds: str) -> dict[str, Tensor]:
        """The state of a parameter, zeros before its first update."""
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), device=local(p).device)
            state |= {kind: torch.zeros_like(p, dtype=self.state_dtype) for kind in kinds}
        return state


class AdamW(Optimizer):
    """AdamW for parameters and moments of any dtypes. It names its state like torch's: exp_avg and exp_avg_sq, in
    --state_dtype, and step."""

    def __init__(self, groups: list[dict], config: Settings):
        """groups: with params, lr, betas, eps and weight_decay."""
        super().__init__(groups, DTYPES[config.state_dtype])
        compiled = config.compile != "none"
        parameters = [p for group in groups for p in group["params"]]
        self.fused = {self.state_dtype, *(p.dtype for p in parameters)} <= {torch.float32}
        self.update_piece = torch.compile(adamw_, dynamic=True) if compiled else adamw_
        size, self.pieces = PIECE["compiled" if compiled else "eager"], {}  # the calls of adamw_ for each parameter
        for number, p in enumerate(() if self.fused else parameters, 1):
            starts = range(0, local(p).numel(), size)
            self.pieces[p] = [(slice(a, a + size), random_place(config.seed, number, p, a)) for a in starts]

    @torch.no_grad()
    def step(self, grad_divisor: Tensor, skip: Tensor) -> None:
        """Updates the parameters that have gradients."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            states = [self.state_of(p, *MOMENTS) for p in parameters]
            if parameters:
                change = self._update_fused if self.fused else self._update_mixed
                change(group, parameters, states, grad_divisor, skip)

    def _update_fused(self, group: dict, parameters: list, states: list, grad_divisor: Tensor, skip: Tensor) -> None:
        beta1, beta2 = group["betas"]
        torch_adamw(  # also adds 1 - skip to each step
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            *([local(state[moment]) for state in states] for moment in MOMENTS),
            [],
            [state["step"] for state in states],
            fused=True,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=grad_divisor,
            found_inf=skip,
        )

    def _update_mixed(self, group: dict, parameters: list, states: list, grad_divisor: Tensor, skip: Tensor) -> None:
        for state in states:
            state["step"].add_(1.0 - skip)
        step = states[0]["step"].clamp(min=1.0)  # the same for all; 0 while every update was skipped
        factors = adamw_factors(group, step, grad_divisor)
        for p, state in zip(parameters, states, strict=True):
            flat = [local(x).detach().view(-1) for x in (p, p.grad, *(state[moment] for moment in MOMENTS))]
            for part, place in self.pieces[p]:
                pieces = [x[part] for x in flat]
                self.update_piece(*pieces, factors, skip > 0, step, place, *group["betas"], group["eps"])


class AdamwFactors(NamedTuple):
    """What changes from step to step in adamw_, as scalars on the device: a number would be compiled anew, and an
    .item() would wait."""

    unscale: Tensor  # 1 / divisor of the gradients
    decay: Tensor  # 1 - lr x weight decay
    rate: Tensor  # lr / (1 - beta1^t)
    root: Tensor  # 1 / sqrt(1 - beta2^t)


def adamw_factors(group: dict, step: Tensor, grad_divisor: Tensor) -> AdamwFactors:
    """group: of an optimizer's parameters. step: the number t of this update."""
    beta1, beta2 = group["betas"]
    return AdamwFactors(
        unscale=1.0 / grad_divisor,
        decay=torch.full_like(step, 1.0 - group["lr"] * group["weight_decay"]),
        rate=group["lr"] / (1.0 - beta1**step),
        root=(1.0 - beta2**step).rsqrt(),
    )


def random_place(seed: int, number: int, parameter: Tensor, offset: int = 0) -> Tensor:
    """int32 [2] on the parameter's device, for random_bits: a key for the parameter of that number, and the position of
    element `offset` of this rank's part in the whole parameter."""
    position = local_start(parameter) + offset
    digest = hashlib.sha256(f"{seed}/{number}/{position >> 32}".encode()).digest()
    return as_int32(int.from_bytes(digest[:4], "little"), position).to(local(parameter).device)


def adamw_(
    p: Tensor,  # [n], fp32 or bf16
    gradient: Tensor,  # [n]
    exp_avg: Tensor,  # [n]
    exp_avg_sq: Tensor,  # [n]
    factors: AdamwFactors,
    skip: Tensor,  # bool scalar
    step: Tensor,  # scalar: the number of this update
    place: Tensor,  # int32 [2], see random_bits
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One update of flat pieces of a parameter and its moments, in place; none if `skip`."""
    gradient = gradient.float() * factors.unscale
    new_avg = torch.lerp(exp_avg.float(), gradient, 1.0 - beta1)
    new_avg_sq = torch.lerp(exp_avg_sq.float(), gradient * gradient, 1.0 - beta2)
    new_p = p.float() * factors.decay - factors.rate * new_avg / (new_avg_sq.sqrt() * factors.root + eps)
    bits = random_bits(p.numel(), place, step)
    new_p, new_avg_sq = rounded(new_p, p.dtype, bits), rounded(new_avg_sq, exp_avg_sq.dtype, bits >> 16)
    for old, new in ((exp_avg, new_avg.to(exp_avg.dtype)), (exp_avg_sq, new_avg_sq), (p, new_p)):
        old.copy_(torch.where(skip, old, new))


def as_int32(*numbers: int) -> Tensor:
    """int32 [len(numbers)]: the lower 32 bits of each."""
    return (torch.tensor(numbers) << 32 >> 32).int()


def random_bits(n: int, place: Tensor, step: Tensor) -> Tensor:
    """int32 [n], all bits random: a hash of (key, position, step), multiplications and xor-shifts in 32 bits. place:
    int32 [2], the parameter's key and the position of the first element."""
    key, start = place
    h = torch.arange(n, dtype=torch.int32, device=step.device) + start
    for salt, multiplier in ((key, 0x7FEB352D), (step.int(), 0x46CA6B45), (0, 0x5BD1E995)):
        h = (h ^ salt) * multiplier
        h = h ^ (h >> 15 & 0x1FFFF)
    return h


def rounded(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """fp32 -> dtype, stochastically if it is bf16: the 16 bits that it lacks are the probability of rounding away from
    zero. bits: the lower 16 are used."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return ((x.view(torch.int32) + (bits & 0xFFFF)) & -65536).view(torch.float32).bfloat16()


def update(optimizer: Optimizer | torch.optim.Optimizer, lr: float, grad_divisor: Tensor, skip: Tensor) -> None:
    """One step with gradients / grad_divisor, or none at all if skip is 1.0 (fp32 scalars on the device); frees the
    gradients. torch's optimizers work, too, but make the host wait. All ranks must call."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if isinstance(optimizer, Optimizer):
        optimizer.step(grad_divisor, skip)
    elif not skip.item():
        for p in parameters:
            local(p.grad).div_(grad_divisor)
        optimizer.step()
    for p in parameters:
        p.grad = None


def learning_rate(config: Settings, step: int) -> float:
    """The rate of update number `step`, counted from 0; a pure function, so that a resumed run needs no scheduler
    state."""
    warmup, steps = config.warmup, config.steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    decay_steps = config.decay_steps * steps if config.decay_steps < 1 else config.decay_steps
    if config.schedule == "wsd":  # falls in the last steps
        begin, end = steps - min(decay_steps or 0.2 * steps, steps - warmup), steps
    else:
        begin, end = warmup, decay_steps or steps
    progress = min(max((step - begin) / max(end - begin, 1), 0.0), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    share = {"constant": 1.0, "cosine": cosine, "linear": 1 - progress, "wsd": 1 - progress}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * share


# ---- Muon

MOMENTUM, FIRST_MOMENTUM, MOMENTUM_STEPS = 0.95, 0.85, 300  # it rises linearly in the first steps
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # small singular values grow fast, large ones stay near 1
ROUND = 2**28  # elements that a rank orthogonalizes at a time


def matrices(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """The parameters that Muon updates: matrices and stacked experts of the blocks, without routers; and the rows of
    the matrices that are fused in each (q, k, v; gate, up)."""
    c, out = model.config, {}
    qkv = tuple(n * c.head_dim for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads))
    for name, p in trainable_parameters(model).items():
        if not name.startswith("layers.") or p.ndim == 1 or name.endswith(".gate.weight"):
            continue
        rows = p.shape[-2]
        out[p] = qkv if "qkv_proj" in name else (rows // 2, rows // 2) if "gate_up" in name else (rows,)
    return out


def orthogonalize(x: Tensor) -> Tensor:
    """x [n, rows, columns] -> U V^T of each x = U S V^T, about: five Newton-Schulz iterations take each singular value
    to between 0.7 and 1.2 (kellerjordan.github.io/posts/muon). A result does not depend on the others of its batch."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    y = x.mT if tall else x
    y = y / y.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = torch.bmm(y, y.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, gram, y, beta=a)
    return y.mT if tall else y


class Muon(Optimizer):
    """Muon (arXiv 2502.16982) for `matrices`, AdamW for all other parameters. All ranks must call `step`.

        m = lerp(g, m, momentum);  u = orthogonalize(lerp(g, m, momentum));  p = p (1 - lr decay) - lr scale u

    scale = 0.2 sqrt(max(rows, columns)) gives the update the size of AdamW's, so that its learning rates transfer.

    A matrix is orthogonalized whole. Parameters of equal shape are stacked, and the stack is redistributed: from shards
    of every parameter to whole parameters, a part of them on each rank, and back. This only copies, so the update has
    the same bits on any mesh. Experts that are sharded by expert stay where they are."""

    def __init__(self, rows: dict[nn.Parameter, tuple[int, ...]], adamw: AdamW, config: Settings):
        """rows: see `matrices`. adamw: updates the other parameters."""
        groups = [{"params": [*rows], "weight_decay": config.weight_decay}, *adamw.param_groups]
        super().__init__(groups, adamw.state_dtype)
        self.adamw, self.rows, self.dtype = adamw, rows, DTYPES[config.dtype]
        adamw.state = self.state  # one dictionary holds the state of both, for checkpoints
        self.orthogonalize = torch.compile(orthogonalize, dynamic=True) if config.compile != "none" else orthogonalize
        self.places = {p: random_place(config.seed, -i, p) for i, p in enumerate(rows)}  # AdamW's numbers are from 1
        alike, self.stacks = defaultdict(list), []
        for p in rows:
            alike[p.shape, rows[p]].append(p)
        for same in alike.values():
            n = max(1, ROUND // same[0].numel()) * (same[0].device_mesh.size() if is_sharded(same[0]) else 1)
            self.stacks += [same[i : i + n] for i in range(0, len(same), n)]

    @torch.no_grad()
    def step(self, grad_divisor: Tensor, skip: Tensor) -> None:
        self.adamw.step(grad_divisor, skip)
        for parameters in self.stacks:
            averages = torch.stack([self._average(p, grad_divisor, skip) for p in parameters])
            updates = self._updates(averages, self.rows[parameters[0]])
            for p, change in zip(parameters, updates, strict=True):
                self._apply(p, change, skip)

    def _average(self, p: Tensor, grad_divisor: Tensor, skip: Tensor) -> Tensor:
        """Updates the momentum of a parameter -> Nesterov's average of it and the gradient, in the gradient's place."""
        state = self.state_of(p, "momentum_buffer")
        gradient, momentum = local(p.grad), local(state["momentum_buffer"])
        weight = MOMENTUM - (MOMENTUM - FIRST_MOMENTUM) * (1 - state["step"] / MOMENTUM_STEPS).clamp(min=0)
        mean = gradient.float() / grad_divisor
        new = mean.lerp(momentum.float(), weight)
        momentum.copy_(torch.where(skip > 0, momentum, new.to(momentum.dtype)))
        gradient.copy_(mean.lerp(new, weight))
        return p.grad.to(self.dtype)

    def _updates(self, stack: Tensor, rows: tuple[int, ...]) -> Tensor:
        """stack [n, ..., rows, columns] of averages -> this rank's part of the updates, sharded as the stack is."""
        if not is_sharded(stack):
            return self._orthogonalized(stack, rows)
        from torch.distributed.tensor import DTensor, Shard

        mesh, shape, stride, shards = stack.device_mesh, stack.shape, stack.stride(), stack.placements
        by_expert = stack.ndim == 4 and shards[-1].is_shard(1)
        wholes = shards if by_expert else [Shard(0)] * mesh.ndim
        stack = stack.to(mesh.device_type).redistribute(placements=wholes)
        updates = self._orthogonalized(stack.to_local(), rows)
        updates = DTensor.from_local(updates, mesh, wholes, shape=shape, stride=stride)
        return updates.redistribute(placements=shards).to_local()

    def _orthogonalized(self, stack: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Of each of the fused matrices by itself."""
        updates = []
        for part in stack.split(rows, -2):
            scale = 0.2 * max(part.shape[-2:]) ** 0.5
            updates.append((self.orthogonalize(part.flatten(0, -3)) * scale).reshape(part.shape))
        return torch.cat(updates, -2)

    def _apply(self, p: Tensor, change: Tensor, skip: Tensor) -> None:
        group, values, step = self.param_groups[0], local(p), self.state[p]["step"]
        step.add_(1.0 - skip)
        new = values.float() * (1.0 - group["lr"] * group["weight_decay"])
        new -= group["lr"] * change.to(new.device, torch.float32)
        bits = random_bits(new.numel(), self.places[p], step).view(new.shape) if p.dtype == torch.bfloat16 else None
        values.copy_(torch.where(skip > 0, values, rounded(new, p.dtype, bits)))
