"""What happens to the gradients of a step: its mean loss, the gradient norm, clipping, AdamW (arXiv 1711.05101); and
the learning rate.

Gradients are sums over the trained tokens. One all-reduce per step adds up the loss, the squared norm and the token
count over the ranks; the divisor (count x clip excess) and the guard against non-finite values stay on the device.

Where parameters and moments are fp32, torch's fused AdamW does the arithmetic. It also takes `grad_scale` (gradients
are divided by it) and `found_inf` (1 suppresses the update) as tensors on the device, inside its one kernel: so the
division by the number of trained tokens, clipping and the guard against non-finite gradients cost no pass over memory
and no synchronisation.

With --update_in_backward a parameter is updated as soon as its gradient is complete, which is then freed. The divisor
is known before the backward pass, and there is no clipping; the norm is summed up for the record alone.

torch's fused AdamW refuses other dtypes. For bf16 moments and bf16 masters there is an AdamW of our own with the same
interface, over flat pieces of the parameters, in fp32 arithmetic, compiled to one pass over memory where there is a
compiler. In that pass it can also write copies of fp32 parameters in bf16, and read gradients in bf16: compiled runs on
a CPU use it for that. An update is often smaller than half of bf16's spacing at the parameter, and rounding to the
nearest would lose it, every step again; so would the second moment's when beta2 is close to 1. Both are rounded
stochastically: up with the probability that keeps the mean (arXiv 2010.06192). The random bits are a hash of (seed,
step, parameter, position): a resumed run repeats them, and replicas, which must stay equal, draw the same."""

import hashlib
import math
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names
PIECE = {"eager": 2**18, "compiled": 2**30}  # elements: what the temporaries of the one fit in a cache; 32-bit indices
SMALL = 2**16  # elements
NORM_ROW = 2**13  # elements


class GradientReducer:
    """Mean loss, gradient norm and divisor of a step, without a host synchronisation. A non-finite loss or norm
    suppresses that step's update on every rank alike; after `limit` of them in a row all later updates are suppressed
    as well, so that the host, which reads the flags one step late, finds the state before."""

    def __init__(
        self, parameters: list[Tensor], clip: float = 0.0, group: dist.ProcessGroup | None = None, replicas: int = 1,
        limit: int = 1, compiled: bool = False,
    ):  # fmt: skip
        """clip: largest norm; 0 = no clipping. group: all ranks; None: one alone. replicas: copies of each parameter
        among them. compiled: on a CPU, the norms of large gradients are."""
        self.parameters, self.clip, self.group, self.replicas, self.limit = parameters, clip, group, replicas, limit
        self.bad_in_row = torch.zeros((), device=local(parameters[0]).device)  # on the host, if they are offloaded
        self.large_norm = torch.compile(norm, dynamic=True) if compiled and not self.bad_in_row.is_cuda else None
        self.local_loss = self.suppress = self.bad_in_row
        self.optimizer: torch.optim.Optimizer | None = None  # the one that updates in the backward pass
        self.running: list[tuple[Tensor, Future]] = []  # parameters that are being updated

    def update_in_backward(self, optimizer: torch.optim.Optimizer, beside: bool = False) -> None:
        """From now on `backward` updates each parameter as soon as its gradient is complete, and frees the gradient:
        they never exist all at once. Steps must have one micro-batch, and no clipping; then the numbers are those of
        an update after the backward pass. beside: a thread updates what is on the host, while the backward pass of
        the layers before goes on.

        A loss that is no number is known before and changes no parameter. But if the loss is a number and a gradient
        is not, the parameters whose gradients were complete before it have been updated; it and all later ones are
        not. That state belongs to no step."""
        self.optimizer, self.worker = optimizer, ThreadPoolExecutor(1) if beside else None
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(partial(self._update_one, [group | {"params": [p]}]))

    def backward(self, loss: Tensor, trained: int, lr: float) -> None:
        """The backward pass of a micro-batch. loss: its sum over this rank's `trained` tokens; lr: the rate of updates
        within. All ranks must call."""
        if self.optimizer is not None:
            sums = torch.stack((loss.detach(), torch.full_like(loss, trained))).to(self.bad_in_row.device)
            if self.group is not None:
                dist.all_reduce(sums, group=self.group)
            total, self.count = sums.unbind()
            # What was seen of this step so far, added up: once it is no number, nothing is updated any more.
            self.seen = (total / self.count).where(self.bad_in_row < self.limit, torch.nan)
            self.norms, self.lr = {}, lr
        loss.backward()
        self._free_gradients(wait=True)

    @torch.no_grad()
    def _update_one(self, groups: list[dict], p: Tensor) -> None:
        """groups: the optimizer's, of this parameter alone."""
        self.norms[p] = self._norms([p])
        square = torch.stack(self.norms[p]).square().sum()
        if self.group is not None:
            dist.all_reduce(square, group=self.group)
        self.seen = self.seen + square
        suppress = (~self.seen.isfinite()).float()
        if self.worker:
            self.running.append((p, self.worker.submit(self._apply, groups, suppress)))
            self._free_gradients()
        else:
            self._apply(groups, suppress)
            p.grad = None

    def _apply(self, groups: list[dict], suppress: Tensor) -> None:
        all_groups, self.optimizer.param_groups = self.optimizer.param_groups, groups
        step(self.optimizer, self.lr, self.count, suppress)
        self.optimizer.param_groups = all_groups

    def _free_gradients(self, wait: bool = False) -> None:
        """Of the parameters that are updated. This thread does it: torch 2.13 crashes where another one frees a DTensor
        that this one is about to let go of."""
        while self.running and (wait or self.running[0][1].done()):
            p, updating = self.running.pop(0)
            updating.result()
            p.grad = None

    def _norms(self, parameters: list[Tensor]) -> list[Tensor]:
        """Of pieces of their gradients."""
        gradients = [local(p.grad).reshape(-1) for p in parameters]
        least = SMALL if self.large_norm else math.inf
        norms = [self.large_norm(g) for g in gradients if len(g) > least]
        # On a CPU torch adds up one value after the other: in fp32 that is wrong by 3e-4 for 10 M of them.
        length = 2**17 if self.bad_in_row.device.type == "cpu" else 2**30
        pieces = [piece for g in gradients if len(g) <= least for piece in g.split(length)]
        return norms + list(torch._foreach_norm(pieces, 2, dtype=torch.float32) if pieces else ())

    def reduce(self, loss: Tensor, trained: int) -> tuple[Tensor, Tensor, Tensor]:
        """loss: this rank's sum over its `trained` tokens, gradients likewise -> (loss per token, gradient norm, what
        the gradients are to be divided by), global, fp32 scalars. All ranks must call."""
        if self.optimizer is None:
            norms = self._norms(self.parameters)
        else:
            norms = [norm for p in self.parameters for norm in self.norms[p]]
        square = torch.stack(norms).square().sum() / self.replicas
        self.local_loss = loss = loss.to(square.device)
        sums = torch.stack((square, loss, torch.full_like(loss, trained)))
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        square, loss, count = sums.unbind()
        norm = square.sqrt() / count
        bad = ~(norm.isfinite() & loss.isfinite())
        self.bad_in_row = (self.bad_in_row + 1) * (bad | (self.bad_in_row >= self.limit))
        self.suppress = (self.bad_in_row > 0).float()
        excess = (norm / self.clip).clamp(min=1.0) if self.clip else torch.ones_like(norm)
        return loss / count, norm, count * excess


def norm(x: Tensor) -> Tensor:
    """Of x [n], fp32: rows first, for a sum of many values loses digits."""
    rows = len(x) // NORM_ROW * NORM_ROW
    return (x[:rows].view(-1, NORM_ROW).float().square().sum(1).sum() + x[rows:].float().square().sum()).sqrt()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def keep_copies(model: nn.Module, optimizer: torch.optim.Optimizer | None, config, accumulates: bool) -> None:
    """From now on matrices and stacked experts that are whole on this rank have copies in the compute dtype, which
    `model.cast` takes: where steps have several micro-batches (`accumulates`), and where the optimizer writes them in
    its own pass over the weights. They are cast once a step, and not in every use. The gradient of a copy is in that
    dtype: with several micro-batches it is added to its weight's in one pass, else it is its weight's. The numbers are
    the same. Only this optimizer may change the weights.

    A copy takes its bytes all the time: --checkpointing block, which saves memory first, goes without. FP8 has copies
    of its own. config: a Config."""
    writes = isinstance(optimizer, MixedAdamW) and _writes_copies(model, config)
    if not (accumulates or writes) or config.checkpointing == "block" or config.fp8 != "off":
        return
    named = {p: name for name, p in model.named_parameters(remove_duplicate=False)}  # a tied weight is lm_head's
    matrices = [p for p, name in named.items() if p.ndim > 1 and not name.startswith("embed_")]
    weights = [p for p in matrices if p.itemsize > model.dtype.itemsize and not is_sharded(p)]
    copies = {p: p.detach().to(model.dtype).requires_grad_() for p in weights}

    def take_gradient(weight: Tensor, copy: Tensor) -> None:
        if weight.grad is not None:
            weight.grad.add_(copy.grad)
        elif accumulates:
            weight.grad = copy.grad.to(weight.dtype)
        else:
            weight.grad_dtype = copy.dtype
            weight.grad = copy.grad
        copy.grad = None

    @torch.no_grad()
    def refresh(*_) -> None:
        torch._foreach_copy_([*copies.values()], weights)

    for weight, copy in copies.items():
        weight.compute_copy = copy
        copy.register_post_accumulate_grad_hook(partial(take_gradient, weight))
    if writes:
        optimizer.copies = copies
    elif optimizer and copies:
        optimizer.register_step_post_hook(refresh)


def _writes_copies(model: nn.Module, config) -> bool:
    """Whether an optimizer of our own pays where torch's would do: on a CPU, where a step on few tokens is as fast as
    memory is."""
    p = next(iter(trained(model).values()))
    on_cpu = p.device.type == "cpu" and not is_sharded(p) and config.offload == "none"
    return on_cpu and config.compile != "none" and config.dtype == "bf16" and not config.update_in_backward


def state_layout(model: nn.Module, config) -> dict[str, dict[str, tuple[torch.Size, torch.dtype]]]:
    """What the optimizer keeps for each trained parameter, besides its number of updates: state name -> (shape, dtype).
    A state of its parameter's shape is sharded as the parameter is. config: a Config."""
    dtype = DTYPES[config.state_dtype]
    return {name: {moment: (p.shape, dtype) for moment in MOMENTS} for name, p in trained(model).items()}


def make_optimizer(model: nn.Module, config) -> torch.optim.Optimizer:
    """Matrices and embeddings decay; biases and norm weights (one dimension) do not. config: a Config."""
    groups = [
        {"params": [p for p in trained(model).values() if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained(model).values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": 1e-8}
    is_fp32 = config.state_dtype == "fp32" and all(p.dtype == torch.float32 for p in trained(model).values())
    if is_fp32 and not _writes_copies(model, config):
        return torch.optim.AdamW(groups, fused=True, **options)
    return MixedAdamW(groups, DTYPES[config.state_dtype], config.seed, config.compile != "none", **options)


class MixedAdamW(torch.optim.Optimizer):
    """AdamW for parameters and moments of any dtypes. Uses `grad_scale` and `found_inf` and keeps its state under the
    names that torch's fused AdamW does: exp_avg, exp_avg_sq (in state_dtype) and step. copies: of some parameters, in
    another dtype, which a step writes anew."""

    def __init__(self, groups, state_dtype: torch.dtype, seed: int = 0, compiled: bool = False, **options):
        super().__init__(groups, options)
        self.state_dtype, self.seed = state_dtype, seed
        self.piece = PIECE["compiled" if compiled else "eager"]
        self.adamw = torch.compile(adamw_, dynamic=True) if compiled else adamw_
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.numbers = {p: number for number, p in enumerate(parameters, 1)}
        self.plans: dict[tuple[Tensor, ...], list] = {}
        self.copies: dict[Tensor, Tensor] = {}
        self._step_supports_amp_scaling = True

    def init_state(self, parameter: Tensor) -> dict[str, Tensor]:
        moments = {key: torch.zeros_like(parameter, dtype=self.state_dtype) for key in MOMENTS}
        return {"step": torch.zeros((), device=local(parameter).device)} | moments

    @torch.no_grad()
    def step(self) -> None:
        """Updates the parameters that have gradients."""
        for group in self.param_groups:
            parameters = tuple(p for p in group["params"] if p.grad is not None)
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: tuple[Tensor, ...], group: dict) -> None:
        """parameters: of one group."""
        for p in parameters:
            if not self.state[p]:
                self.state[p].update(self.init_state(p))
        if parameters not in self.plans:
            self.plans[parameters] = self._make_plan(parameters)
        steps = [self.state[p]["step"] for p in parameters]
        torch._foreach_add_(steps, [1.0 - self.found_inf] * len(steps))  # tensors: a scalar would have to be read
        t, keep = steps[0].clamp(min=1.0), self.found_inf > 0
        factors = self._factors(group, t)
        for together, part, place in self.plans[parameters]:
            tensors = [(p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]) for p in together]
            flat = [[local(x).detach().view(-1)[part] for x in xs] for xs in zip(*tensors, strict=True)]
            joined = [xs[0] if len(xs) == 1 else torch.cat(xs) for xs in flat]
            copies = [self.copies[p].detach().view(-1)[part] for p in together if p in self.copies]
            copy = copies[0] if len(together) == len(copies) == 1 else None
            self.adamw(*joined, factors, keep, t, place, *group["betas"], group["eps"], copy)
            if len(together) > 1:
                for xs, new in zip(flat, joined, strict=True):
                    torch._foreach_copy_(xs, new.split([len(x) for x in xs]))
            if copies and copy is None:
                torch._foreach_copy_(copies, [p.view(-1) for p in together if p in self.copies])

    def _factors(self, group: dict, t: Tensor) -> Tensor:
        """What adamw_ takes and changes from step to step: a number would be compiled anew, an .item() would wait."""
        beta1, beta2 = group["betas"]
        decay = torch.full_like(t, 1.0 - group["lr"] * group["weight_decay"])
        return torch.stack((1.0 / self.grad_scale, decay, group["lr"] / (1.0 - beta1**t), (1.0 - beta2**t).rsqrt()))

    def _make_plan(self, parameters: tuple[Tensor, ...]) -> list[tuple[list[Tensor], slice, Tensor]]:
        """What one call of adamw_ updates each: (parameters, part of their elements, place). A large parameter goes in
        pieces. Small ones go together: a call takes the host longer than their update."""
        plan, small, places, sizes = [], [], [], []
        for p in parameters:
            number, start, n = self.numbers[p], _local_start(p), local(p).numel()
            if n <= SMALL:
                small.append(p)
                places.append((self._key(number, start), start - sum(sizes)))
                sizes.append(n)
            for a in range(0, n, self.piece) if n > SMALL else ():
                place = as_int32([(self._key(number, start + a), start + a)])
                plan.append(([p], slice(a, a + self.piece), place.to(local(p).device)))
        if small:
            place = as_int32(places).repeat_interleave(torch.tensor(sizes), 1)
            plan.append((small, slice(None), place.to(local(small[0]).device)))
        return plan

    def _key(self, number: int, position: int) -> int:
        """32 bits for the parameter of that number, and for what is beyond 32 bits of a position in it."""
        digest = hashlib.sha256(f"{self.seed}/{number}/{position >> 32}".encode()).digest()
        return int.from_bytes(digest[:4], "little")


def adamw_(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, factors: Tensor, keep: Tensor, step: Tensor, place: Tensor,
    beta1: float, beta2: float, eps: float, copy: Tensor | None = None,
) -> None:  # fmt: skip
    """Update number `step` of flat pieces, in place; none if `keep`. factors: 1 / gradient scale, 1 - lr decay, lr /
    (1 - beta1^t), 1 / sqrt(1 - beta2^t). place: see random_bits. copy: gets the new parameter, too."""
    unscale, decay, rate, root = factors.unbind()
    g = g.float() * unscale
    new_m = torch.lerp(m.float(), g, 1.0 - beta1)
    new_v = torch.lerp(v.float(), g * g, 1.0 - beta2)
    new_p = p.float() * decay - rate * new_m / (new_v.sqrt() * root + eps)
    if torch.bfloat16 in (p.dtype, v.dtype):
        bits = random_bits(p.numel(), place, step)
        new_p = round_stochastically(new_p, bits) if p.dtype == torch.bfloat16 else new_p
        new_v = round_stochastically(new_v, bits >> 16) if v.dtype == torch.bfloat16 else new_v
    for old, new in ((m, new_m), (v, new_v), (p, new_p)):
        old.copy_(torch.where(keep, old, new.to(old.dtype)))
    if copy is not None:
        copy.copy_(p)


def as_int32(places: list[tuple[int, int]]) -> Tensor:
    """int32 [2, len(places)]: the lower 32 bits of keys and positions."""
    return (torch.tensor(places).T << 32 >> 32).int()


def random_bits(n: int, place: Tensor, step: Tensor) -> Tensor:
    """int32 [n], all bits random: a hash of (key, position, step), multiplications and xor-shifts in 32 bits. place:
    int32 [2, 1 or n], the parameter's key and the position of the first element; or that of each, less its index."""
    key, start = place
    h = torch.arange(n, dtype=torch.int32, device=step.device) + start
    for salt, multiplier in ((key, 0x7FEB352D), (step.int(), 0x46CA6B45), (0, 0x5BD1E995)):
        h = (h ^ salt) * multiplier
        h = h ^ (h >> 15 & 0x1FFFF)
    return h


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 -> bf16: the 16 bits that bf16 lacks are the probability of rounding away from zero. bits: the lower 16 are
    used."""
    return ((x.view(torch.int32) + (bits & 0xFFFF)) & -65536).view(torch.float32).bfloat16()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. One process makes none, and is spared their import, which takes half a second."""
    return hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def local_part(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """-> (shape of this rank's part, where it begins in the whole tensor)"""
    if not is_sharded(tensor):
        return tensor.shape, (0,) * tensor.ndim
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def _local_start(tensor: Tensor) -> int:
    """The number that the first element of this rank's part has in the whole tensor."""
    return sum(s * math.prod(tensor.shape[d + 1 :]) for d, s in enumerate(local_part(tensor)[1]))


def update(optimizer: torch.optim.Optimizer, lr: float, divisor: Tensor, suppress: Tensor) -> None:
    """One step with gradients / divisor, or none at all where suppress is 1 (fp32 scalars on the device); frees the
    gradients. Any torch optimizer will do, but one that is neither fused AdamW nor MixedAdamW makes the host wait."""
    step(optimizer, lr, divisor, suppress)
    optimizer.zero_grad(set_to_none=True)


def step(optimizer: torch.optim.Optimizer, lr: float, divisor: Tensor, suppress: Tensor) -> None:
    """`update`, but for the gradients, which stay."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, (torch.optim.AdamW, MixedAdamW)) and optimizer._step_supports_amp_scaling:
        optimizer.grad_scale, optimizer.found_inf = divisor, suppress
        optimizer.step()
    elif not suppress.item():
        for p in parameters:
            local(p.grad).div_(divisor)
        optimizer.step()
    # torch counts no update of a DTensor; FP8 and offloading go by the count.
    torch.autograd.graph.increment_version([p._local_tensor for p in parameters if is_sharded(p)])


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
