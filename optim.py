"""What follows the backward pass of a step: the sums of loss, tokens and squared norm over the ranks, then AdamW (arXiv
1711.05101) or Muon (arXiv 2502.16982); and the learning rate.

Gradients are sums over the trained tokens. One all-reduce per step adds up the loss, the squared norm and the token
count over the ranks. From these sums, train.py's `train_step` computes the mean, the norm and the clip factor, and
tests whether they are finite, which decides whether the update is skipped. All of this stays on the device of the
gradients; the host reads the decision one step later, in `Gradients.check`.

An `Optimizer` updates parameters and state of any dtypes. Its rule computes in fp32, on flat chunks of the parameters,
compiled to one pass over memory unless --compile is none. If parameters and moments are fp32, AdamW calls torch's fused
kernel instead, which does the same arithmetic. This kernel also divides gradients by `grad_scale` and skips the update
if `found_inf` is 1. Both are tensors on the device. So the division by the number of trained tokens, clipping and the
guard against non-finite gradients cost no pass over memory, except for the norm, and no synchronisation.

An update is often smaller than half of bf16's spacing at the parameter, so rounding to nearest would lose it in every
step. Changes of the second moment would be lost the same way if beta2 is close to 1. Both are rounded stochastically:
up with the probability that keeps the mean (arXiv 2010.06192). Between 1 and 2, bf16 has a value every 2^-7 = 0.0078.
An update of 0.0001 at 1.0 would always be rounded away. With stochastic rounding it moves the parameter by 0.0078 in
one step of 78, which is 0.0001 a step on average. The random bits are a hash of (seed, step, parameter, position): a
resumed run repeats them, and replicas, which must stay equal, draw the same."""

import hashlib
import logging
import math
import threading
from collections import defaultdict
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.adamw import adamw as torch_adamw

from base import torch_private
from base.errors import Failure
from base.ranks import Ranks, gather
from base.tensors import is_sharded, local, local_start

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
CHUNK = {"eager": 2**18, "compiled": 2**30}  # elements: eager temporaries fit in a cache; compiled indices in 32 bits
SKIPS = 10  # updates in a row that --on_nonfinite skip leaves out before it gives up
SPIKE_WINDOW, SPIKE_START = 128, 64  # accepted steps that --skip_spikes looks back, and those before it acts
STOCHASTIC = ("exp_avg_sq",)  # state that is rounded stochastically; other state changes fast enough for bf16
logger = logging.getLogger("flatland")


class Gradients:
    """Sums a step's loss, units (trained tokens, or pairs) and squared norm of the gradients over the ranks. Remembers
    and counts the steps whose update is skipped, because their loss or norm is not finite or a spike. The host waits
    only for the step before, unless the gradients are offloaded to it."""

    def __init__(self, model: nn.Module, config, ranks: Ranks, mesh: DeviceMesh | None, spikes: tuple = ()):
        """spikes: from a checkpoint, of --skip_spikes."""
        self.parameters = [*trainable_parameters(model).values()]
        self.config, self.ranks = config, ranks
        self.group = None
        if ranks.world_size > 1:  # offloaded gradients are on the host, where the control group's backend works
            self.group = ranks.control if config.offload == "cpu" else dist.group.WORLD
        self.replicas = 1 if mesh is None else mesh["replicate"].size()  # copies of each parameter among the ranks
        self.device = local(self.parameters[0]).device  # the host, if they are offloaded
        # Of the last step. skip: 1.0 = no update; spike: 1.0 = because it is a spike.
        self.local_loss = self.skip = self.spike = torch.zeros((), device=self.device)
        # pending: steps whose skip is on its way to the host. skipped_in_row: steps in a row that are not finite.
        # skipped: all skipped steps since the last record.
        self.pending, self.skipped_in_row, self.skipped = [], 0, 0
        # Losses and norms of accepted steps, the newest last; NaN before the first. fp64: equal values deviate by 0.
        missing = [[math.nan, math.nan]] * (SPIKE_WINDOW - len(spikes))
        self.accepted = torch.tensor([*missing, *spikes], dtype=torch.float64, device=self.device)  # [window, 2]

    def global_sums(self, local_loss: Tensor, local_units: int) -> tuple[Tensor, Tensor, Tensor]:
        """local_loss: this rank's loss, summed over its local_units -> (loss, units, squared
        norm of the gradients), summed over all ranks with one all-reduce: fp32 scalars on the gradients' device. All
        ranks must call.

        Each rank squares the norm of its shards. The sum over the ranks counts every value once per replica, so it
        is divided by their number."""
        self.local_loss = local_loss.to(self.device)
        # On a CPU torch adds one value after the other; in fp32 the norm of 10 M values is then wrong by 3e-4.
        chunk = 2**17 if self.device.type == "cpu" else 2**30
        chunks = [part for p in self.parameters for part in local(p.grad).reshape(-1).split(chunk)]
        norms = torch.stack(torch_private.norms(chunks, dtype=torch.float32))
        squared_norm = norms.square().sum() / self.replicas
        sums = torch.stack((self.local_loss, torch.full_like(self.local_loss, local_units), squared_norm))
        if self.group is not None:
            dist.all_reduce(sums, group=self.group)
        return sums.unbind()

    def skip_spike(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Also skips a step whose loss or norm is more than --skip_spikes standard deviations above the mean of the
        last accepted steps, as SkipStepOptimizer of OLMo-core does. A skipped step does not enter the mean. All of it
        stays on the device and follows from sums over the ranks, so all ranks decide the same."""
        values = torch.stack((loss, grad_norm)).double()
        count = self.accepted[:, 0].isfinite().sum()
        mean = self.accepted.nanmean(0)
        deviation = ((self.accepted - mean).square().nansum(0) / (count - 1)).sqrt()
        is_above = (values > mean + self.config.skip_spikes * deviation).any()
        self.spike = (is_above & (count >= SPIKE_START)).float() * (1.0 - self.skip)
        self.skip = self.skip + self.spike
        self.accepted = torch.where(self.skip > 0, self.accepted, torch.cat((self.accepted[1:], values[None])))

    def accepted_values(self) -> list[list[float]]:
        """[loss, norm] of the accepted steps, for a checkpoint; waits for the device."""
        return self.accepted[self.accepted[:, 0].isfinite()].tolist()

    def check(self, step: int, wait: bool = False) -> None:
        """Waits for the step before and reads whether its update was skipped; with `wait`, also for this step. Raises
        Failure after a skipped update; with --on_nonfinite skip, warns, and raises it after SKIPS in a row. Call it
        once a step; the outcome is the same on all ranks.

        Why the host reads one step late: it only starts kernels, and the GPU computes them afterwards.

            host   start step 1 | start step 2, read flag 1 | start step 3, read flag 2 | start step 4, read flag 3
            GPU           compute step 1            | compute step 2            | compute step 3            |

        If the host read flag 2 right after it has started step 2, it would wait until step 2 is computed. The GPU
        would then have nothing to do until the host has started step 3. One step late, the GPU still has a step to
        compute while the host waits. This is safe, because the device itself skips the update of a bad step: no
        later step sees its gradients. The vote to stop (job/job.py) is read one step late for the same reason."""
        flags = torch.stack((self.skip, self.spike, self.local_loss)).to("cpu", non_blocking=True)  # into pinned memory
        copied = torch.get_device_module(self.device).Event()
        copied.record()
        self.pending.append((step, flags, copied))
        while len(self.pending) > (0 if wait else 1):
            step_read, flags, copied = self.pending.pop(0)
            copied.synchronize()
            skipped, spike, local_loss = flags.tolist()
            self.skipped += bool(skipped)
            if not spike:
                self.skipped_in_row = self.skipped_in_row + 1 if skipped else 0
            if skipped:
                self._warn_or_stop(step_read, local_loss, spike)

    def count_skipped(self) -> dict[str, int]:
        """The updates skipped since the last call, for the record; nothing without --skip_spikes."""
        skipped, self.skipped = self.skipped, 0
        return {"skipped": skipped} if self.config.skip_spikes else {}

    def _warn_or_stop(self, step: int, local_loss: float, spike: float) -> None:
        losses = gather((self.ranks.name, local_loss), self.ranks)
        bad = [row for row in losses if not math.isfinite(row[1])]
        what = f"{'the loss' if bad else 'the gradient norm'} is not finite"
        if not any(loss for _, loss in losses):
            what = "no token of any rank is trained on"
        row = f"; updates skipped in a row: {self.skipped_in_row}"
        if spike:
            what, row = f"the loss or the gradient norm is a spike for --skip_spikes {self.config.skip_spikes:g}", ""
        listed = ", ".join(f"{loss} on {rank}" for rank, loss in (bad or losses)[:8])
        message = (
            f"Step {step}: {what} (summed loss: {listed}){row}."
            f" `python data.py show --run {self.config.out} --step {step}` prints its rows"
        )
        if not spike and (self.config.on_nonfinite == "stop" or self.skipped_in_row == SKIPS):
            raise Failure(f"{message}. A smaller --lr (--resume_override lr) or --on_nonfinite skip may help")
        logger.warning(message)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are not frozen, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def make_optimizer(model: nn.Module, config) -> "Optimizer":
    """AdamW, or, with --optimizer muon, Muon for the blocks' matrices and AdamW for the rest. --embed_lr sets
    the learning rate of embeddings. Matrices and embeddings decay; biases and norm weights (one dimension) do not."""
    by_muon = matrices(model) if config.optimizer == "muon" else {}
    decay, scale = config.weight_decay, (config.embed_lr or config.lr) / config.lr
    embeddings, others, vectors = [], [], []
    for name, p in trainable_parameters(model).items():
        if p in by_muon:
            continue
        if name.startswith("embed_"):
            embeddings.append(p)
        elif p.ndim >= 2:
            others.append(p)
        else:
            vectors.append(p)
    groups = [
        {"params": embeddings, "weight_decay": decay, "scale": scale},
        {"params": others, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    kind = OPTIMIZERS[config.optimizer]
    optimizer = kind(by_muon, groups, config) if kind is Muon else kind(groups, config)
    logger.info("Created optimizer")
    return optimizer


class Optimizer:
    """Updates parameters by the `rule` of a subclass. It does not extend torch.optim.Optimizer, whose import loads the
    compiler: that takes a second and 60 MB."""

    state_names: tuple[str, ...]  # of the tensors that the rule keeps for each parameter

    def __init__(self, groups: list[dict], config):
        """groups: params, weight_decay and, if it is not 1, the scale of the learning rate."""
        self.param_groups, self.config, self.compiled = groups, config, config.compile != "none"
        self.beta1, self.beta2, self.state_dtype = config.beta1, config.beta2, DTYPES[config.state_dtype]
        parameters = [p for group in groups for p in group["params"]]
        self.numbers = {p: number for number, p in enumerate(parameters, 1)}  # see rounding_seed
        self.state = {p: self.zeros(p, self.state_names) for p in parameters}
        self.may_update = threading.Event()  # cleared while a save copies the state
        self.may_update.set()
        self.update_chunk = torch.compile(self._update_chunk, dynamic=True) if self.compiled else self._update_chunk

    def zeros(self, p: Tensor, names: tuple[str, ...]) -> dict[str, Tensor]:
        """A parameter's state before its first update: the number of updates, and tensors of the parameter's shape."""
        step = torch.zeros((), device=local(p).device)
        return {"step": step} | {name: torch.zeros_like(p, dtype=self.state_dtype) for name in names}

    @torch.no_grad()
    def step(self, lr: float, grad_divisor: Tensor, skip: Tensor) -> None:
        """Updates the parameters with gradients / grad_divisor, or changes nothing if skip is 1.0 (fp32 scalars on the
        gradients' device). Frees the gradients. All ranks must call."""
        self.may_update.wait()
        for group in self.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
            if group["params"]:
                self.update(group, grad_divisor, skip)
            for p in group["params"]:
                p.grad = None

    def update(self, group: dict, grad_divisor: Tensor, skip: Tensor) -> None:
        """`step` for one group of parameters."""
        arguments = self._arguments(group, skip) | {"inverse_divisor": 1.0 / grad_divisor}
        for p in group["params"]:
            self._update_parameter(p, p.grad, arguments)

    def _arguments(self, group: dict, skip: Tensor) -> dict[str, Tensor]:
        """Counts an update of a group -> the arguments of _update_chunk that its parameters share."""
        steps = [self.state[p]["step"] for p in group["params"]]  # all are equal
        torch_private.add_to(steps, 1.0 - skip)
        step = steps[0].clamp(min=1.0)  # it is 0 while every update was skipped
        return {"step": step, "skip": skip > 0, **self.scalars(group, step)}

    def _update_parameter(self, p: Tensor, gradient: Tensor, arguments: dict[str, Tensor]) -> None:
        gradient = local(gradient).reshape(-1)
        for chunk, seed, (values, *state) in self.chunks[p]:
            self.update_chunk(values, gradient[chunk], *state, seed=seed, **arguments)

    def scalars(self, group: dict, step: Tensor) -> dict[str, Tensor]:
        """The arguments of the rule that change from step to step, as scalars on the device: a number would be compiled
        anew, and an .item() would wait. step: the number of this update. These suit a simple rule, as guide/8's."""
        lr = group["lr"]
        return {"lr": torch.full_like(step, lr), "decay": torch.full_like(step, 1.0 - lr * group["weight_decay"])}

    def rule(self, p: Tensor, gradient: Tensor, *state: Tensor, **scalars: Tensor) -> tuple[Tensor, ...]:
        """All fp32 [n] -> new values of p and of each state. This one has no state."""
        return (p * scalars["decay"] - scalars["lr"] * gradient,)

    def _update_chunk(
        self,
        p: Tensor,  # [n], fp32 or bf16; n is up to 2^18 = 262,144 uncompiled, 2^30 compiled
        gradient: Tensor,  # [n]
        *state: Tensor,  # [n] each; AdamW: exp_avg, exp_avg_sq
        seed: Tensor,  # int32 [2], see rounding_seed
        step: Tensor,  # scalar: the number of this update
        skip: Tensor,  # bool scalar
        inverse_divisor: Tensor,  # scalar: 1 / grad_divisor
        **scalars: Tensor,
    ) -> None:
        """One update of a flat chunk of a parameter and of its state, in place; none if `skip`."""
        state_in_fp32 = [x.float() for x in state]
        new_p, *new_state = self.rule(p.float(), gradient.float() * inverse_divisor, *state_in_fp32, **scalars)
        bits = random_bits(p.numel(), seed, step) if torch.bfloat16 in (p.dtype, *(x.dtype for x in state)) else 0
        p.copy_(torch.where(skip, p, rounded(new_p, p.dtype, bits)))
        for name, old, new in zip(self.state_names, state, new_state, strict=False):
            new = rounded(new, old.dtype, bits >> 16) if name in STOCHASTIC else new.to(old.dtype)
            old.copy_(torch.where(skip, old, new))

    @cached_property
    def chunks(self) -> dict[nn.Parameter, list[tuple]]:
        """The chunks of each parameter's flat shard that are updated at a time: the slice, its rounding_seed, and views
        of the parameter and of its state, which take a tenth of a millisecond."""
        size, chunks = CHUNK["compiled" if self.compiled else "eager"], {}
        for p, number in self.numbers.items():
            tensors = p, *(self.state[p][name] for name in self.state_names if name in self.state[p])
            flat = [local(x).detach().view(-1) for x in tensors]
            chunks[p] = [
                (slice(a, a + size), rounding_seed(self.config.seed, number, p, a), [x[a : a + size] for x in flat])
                for a in range(0, len(flat[0]), size)
            ]
        return chunks


class AdamW(Optimizer):
    """AdamW (arXiv 1711.05101). If parameters and state are fp32, torch's fused kernel computes it. In step t:

        m = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g^2
        p = p (1 - lr decay) - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)

    m and v begin at 0, so they are too small at first. If all gradients are g, then m = (1 - beta1^t) g, and the
    division by 1 - beta1^t gives g. The ratio m / sqrt(v) is about 1 if a gradient keeps its sign and size, and small
    if its sign changes. So lr is about the largest change of a parameter in a step, whatever the gradient's size."""

    state_names = ("exp_avg", "exp_avg_sq")  # torch's
    eps = 1e-8

    def scalars(self, group: dict, step: Tensor) -> dict[str, Tensor]:
        """The rate and the inverse root contain the bias corrections."""
        return {
            "decay": torch.full_like(step, 1.0 - group["lr"] * group["weight_decay"]),
            "rate": group["lr"] / (1.0 - self.beta1**step),
            "inverse_root": (1.0 - self.beta2**step).rsqrt(),
        }

    def rule(
        self,
        p: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        decay: Tensor,
        rate: Tensor,
        inverse_root: Tensor,
    ) -> tuple[Tensor, ...]:
        exp_avg = torch.lerp(exp_avg, gradient, 1.0 - self.beta1)
        exp_avg_sq = torch.lerp(exp_avg_sq, gradient * gradient, 1.0 - self.beta2)
        p = p * decay - rate * exp_avg / (exp_avg_sq.sqrt() * inverse_root + self.eps)
        return p, exp_avg, exp_avg_sq

    def update(self, group: dict, grad_divisor: Tensor, skip: Tensor) -> None:
        parameters = group["params"]
        if {self.state_dtype, *(p.dtype for p in parameters)} != {torch.float32}:
            return super().update(group, grad_divisor, skip)
        states = [self.state[p] for p in parameters]
        torch_adamw(  # also adds 1 - skip to each step
            [local(p) for p in parameters],
            [local(p.grad) for p in parameters],
            *([local(state[name]) for state in states] for name in self.state_names),
            [],
            [state["step"] for state in states],
            fused=True,
            lr=group["lr"],
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=group["weight_decay"],
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_divisor,
            found_inf=skip,
        )


def rounding_seed(seed: int, number: int, parameter: Tensor, offset: int) -> Tensor:
    """int32 [2] on the parameter's device, for random_bits: a key for the parameter of that number, and the position of
    element `offset` of this rank's shard in the whole parameter."""
    position = local_start(parameter) + offset
    digest = hashlib.sha256(f"{seed}/{number}/{position >> 32}".encode()).digest()
    numbers = torch.tensor((int.from_bytes(digest[:4], "little"), position)) << 32 >> 32  # the lower 32 bits of each
    return numbers.int().to(local(parameter).device)


def random_bits(n: int, seed: Tensor, step: Tensor) -> Tensor:
    """int32 [n], all bits random: a hash of (key, position, step), multiplications and xor-shifts in 32 bits. seed: see
    rounding_seed."""
    key, start = seed
    h = torch.arange(n, dtype=torch.int32, device=step.device) + start
    for salt, multiplier in ((key, 0x7FEB352D), (step.int(), 0x46CA6B45), (0, 0x5BD1E995)):
        h = (h ^ salt) * multiplier
        h = h ^ (h >> 15 & 0x1FFFF)
    return h


def rounded(x: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    """fp32 -> dtype, stochastically if it is bf16: the 16 bits that it lacks are the probability of rounding away from
    zero. bits: the lower 16 are used. A bf16 is the upper half of an fp32. If the lower half is 0x4000, a quarter of
    2^16, then adding a random number below 2^16 carries into the upper half in a quarter of all cases."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    return ((x.view(torch.int32) + (bits & 0xFFFF)) & -65536).view(torch.float32).bfloat16()


def learning_rate(config, step: int) -> float:
    """The rate of a step, counted from 1; a pure function, so that a resumed run needs no scheduler state.

        constant   /-----------      cosine    /--..                wsd     /-------
                  /                           /      `.                    /        `.
                 /                           /         `--                /           `.
                 warm-up                     warm-up                      warm-up    decay_steps

    `linear` is `cosine` with a straight line. wsd: warm-up, stable, decay (arXiv 2404.06395)."""
    warmup, steps, done = config.warmup, config.steps, step - 1
    if done < warmup:
        return config.lr * step / warmup
    decay_steps = config.decay_steps * steps if config.decay_steps < 1 else config.decay_steps
    if config.schedule == "wsd":  # decay_steps is a length: the rate falls in the last steps
        length = decay_steps or 0.2 * steps
        begin, end = steps - min(length, steps - warmup), steps
    else:  # decay_steps is the last step of the decay
        begin, end = warmup, decay_steps or steps
    progress = min(max((done - begin) / max(end - begin, 1), 0.0), 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    share = {"constant": 1.0, "cosine": cosine, "linear": 1 - progress, "wsd": 1 - progress}[config.schedule]
    return config.min_lr + (config.lr - config.min_lr) * share


# ---- Muon

MOMENTUM, FIRST_MOMENTUM, MOMENTUM_STEPS = 0.95, 0.85, 300  # it rises linearly in the first steps
# From kellerjordan.github.io/posts/muon; see `orthogonalize`.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
STACK_ELEMENTS = 2**28  # elements that a rank orthogonalizes at a time


def matrices(model: nn.Module) -> dict[nn.Parameter, tuple[int, ...]]:
    """The parameters that Muon updates: matrices and stacked experts of the blocks, without routers -> the heights of
    the matrices that are fused in each (q, k, v; gate, up)."""
    c, heights = model.config, {}
    qkv = tuple(n * c.head_dim for n in (c.n_heads, c.n_kv_heads, c.n_kv_heads))
    for name, p in trainable_parameters(model).items():
        if not name.startswith("layers.") or p.ndim == 1 or name.endswith(".gate.weight"):
            continue
        height = p.shape[-2]
        if "qkv_proj" in name:
            heights[p] = qkv
        elif "gate_up" in name:
            heights[p] = (height // 2, height // 2)
        else:
            heights[p] = (height,)
    return heights


def stack_alike(heights: dict[nn.Parameter, tuple[int, ...]], ranks: int) -> list[list[nn.Parameter]]:
    """Parameters of equal shape that are orthogonalized together. heights: see `matrices`."""
    alike, stacks = defaultdict(list), []
    for p, parts in heights.items():
        alike[p.shape, parts].append(p)
    for same in alike.values():
        n = ranks * max(1, STACK_ELEMENTS // same[0].numel())
        stacks += [same[i : i + n] for i in range(0, len(same), n)]
    return stacks


def orthogonalize(x: Tensor) -> Tensor:
    """x [n, rows, columns], as [8, 4096, 14336] -> U V^T of each x = U S V^T, about: five Newton-Schulz iterations take
    singular values to between 0.7 and 1.2. A result does not depend on the others of its batch.

    The division by the norm takes all singular values into 0 ... 1. For y = U S V^T, the product y y^T y is U S^3 V^T.
    So a y + b (y y^T) y + c (y y^T)^2 y changes each singular value s by itself, and keeps U and V:

        s -> a s + b s^3 + c s^5       0.01 -> 0.034 -> 0.118 -> 0.400 -> 1.093 -> 0.699
                                       0.50 -> 1.189 -> 0.896 -> 0.824 -> 0.938 -> 0.765

    Near 0 a step multiplies s by a. The classical coefficients (1.5, -0.5, 0) converge to 1 exactly, but after five
    steps from 0.01 they have reached 0.076. These three have a large a instead, and in return s only stays near 1.
    That is enough: all directions of the update get about the same length. Smaller ones than 0.01 get less."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[1] > x.shape[2]
    y = x.mT if tall else x
    y = y / y.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = torch.bmm(y, y.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, gram, y, beta=a)
    return y.mT if tall else y


def equalize(x: Tensor) -> Tensor:
    """`orthogonalize`, and then in each matrix all vectors along its longer side get one length. Its norm stays.

    The longer side of an MLP's weights are its neurons: rows of gate_proj and up_proj, columns of down_proj. Of an
    orthogonal [4, 2], only the columns have length 1. Its rows can have lengths from 0 to 1: some neurons would learn
    faster than others. NorMuon (arXiv 2510.05491) divides rows by a moving average of their lengths, which needs a
    state, and was not better (BENCHMARKS.md)."""
    x = orthogonalize(x)
    lengths = x.float().norm(dim=-1 if x.shape[-2] >= x.shape[-1] else -2, keepdim=True)
    mean = lengths.square().mean((-2, -1), keepdim=True).sqrt()
    return (x * (mean / lengths.clamp(min=1e-7))).to(x.dtype)


class Muon(AdamW):
    """Muon (arXiv 2502.16982) for `matrices`, AdamW for all other parameters. All ranks must call `step`.

        buffer = lerp(g, buffer, momentum)
        u = orthogonalize(lerp(g, buffer, momentum));  p = p (1 - lr decay) - lr scale u

    scale = 0.2 sqrt(max(rows, columns)) gives the update the size of AdamW's, so that its learning rates transfer: with
    r <= c, an orthogonal [r, c] has r singular values of 1. So the sum of its squares is r, and its root mean square is
    sqrt(r / (r c)) = 1 / sqrt(c). Times the scale it is 0.2, as AdamW's updates usually have it (arXiv 2502.16982).

    A matrix is orthogonalized whole. Parameters of equal shape are stacked, and the stack is redistributed: from shards
    of every parameter to whole parameters, a part of them on each rank, and back. This only copies, so the update has
    the same bits on any mesh. Experts that are sharded by expert stay where they are."""

    def __init__(self, heights: dict[nn.Parameter, tuple[int, ...]], groups: list[dict], config):
        """heights: see `matrices`. groups: the other parameters."""
        super().__init__(groups, config)
        self.heights, self.dtype = heights, DTYPES[config.dtype]
        function = equalize if config.equal_neurons else orthogonalize
        self.orthogonalize = torch.compile(function, dynamic=True) if self.compiled else function
        self.matrix_group = {"params": [*heights], "weight_decay": config.weight_decay}
        self.param_groups = [*groups, self.matrix_group]
        self.state |= {p: self.zeros(p, ("momentum_buffer",)) for p in heights}
        self.numbers |= {p: -i for i, p in enumerate(heights)}
        self.stacks = stack_alike(heights, dist.get_world_size() if dist.is_initialized() else 1)

    def update(self, group: dict, grad_divisor: Tensor, skip: Tensor) -> None:
        if group is not self.matrix_group:
            return super().update(group, grad_divisor, skip)
        step = self.state[group["params"][0]]["step"]
        momentum = MOMENTUM - (MOMENTUM - FIRST_MOMENTUM) * (1 - step / MOMENTUM_STEPS).clamp(min=0)
        arguments = self._arguments(group, skip) | {"inverse_divisor": torch.ones_like(grad_divisor)}
        for stack in self.stacks:
            averages = (self._average(p, momentum, grad_divisor, arguments["skip"]) for p in stack)
            updates = self._updates(torch.stack([*averages]), self.heights[stack[0]])
            for p, change in zip(stack, updates, strict=True):
                self._update_parameter(p, change.to(local(p).device), arguments)

    def scalars(self, group: dict, step: Tensor) -> dict[str, Tensor]:
        return (Optimizer if group is self.matrix_group else AdamW).scalars(self, group, step)

    def rule(self, *tensors: Tensor, **scalars: Tensor) -> tuple[Tensor, ...]:
        """Without state for a matrix: p and its update."""
        return (AdamW if tensors[2:] else Optimizer).rule(self, *tensors, **scalars)

    def _average(self, p: Tensor, momentum: Tensor, grad_divisor: Tensor, skip: Tensor) -> Tensor:
        """Updates the momentum of a parameter -> Nesterov's average of it and the gradient, in the gradient's place."""
        gradient, buffer = local(p.grad), local(self.state[p]["momentum_buffer"])
        mean = gradient.float() / grad_divisor
        average = mean.lerp(buffer.float(), momentum)
        buffer.copy_(torch.where(skip, buffer, average.to(buffer.dtype)))
        gradient.copy_(mean.lerp(average, momentum))
        return p.grad.to(self.dtype)

    def _updates(self, stack: Tensor, heights: tuple[int, ...]) -> Tensor:
        """stack [n, ..., rows, columns] of averages -> this rank's shard of the updates, sharded as the stack is."""
        if not is_sharded(stack):
            return self._orthogonalized(stack, heights)
        from torch.distributed.tensor import DTensor, Shard

        mesh, shape, stride, sharded = stack.device_mesh, stack.shape, stack.stride(), stack.placements
        by_expert = stack.ndim == 4 and sharded[-1].is_shard(1)  # [n, E, rows, columns]
        # With replicas, each takes a part of the stack first. In one call, DTensor would gather whole stacks.
        parts = sharded if by_expert else [Shard(0), *sharded[1:]]
        whole = sharded if by_expert else [Shard(0)] * mesh.ndim
        stack = stack.to(mesh.device_type)  # offloaded ones are on the host
        stack = stack.redistribute(placements=parts).redistribute(placements=whole)
        stack = self._orthogonalized(stack.to_local(), heights)
        stack = DTensor.from_local(stack, mesh, whole, shape=shape, stride=stride)
        return stack.redistribute(placements=parts).redistribute(placements=sharded).to_local()

    def _orthogonalized(self, stack: Tensor, heights: tuple[int, ...]) -> Tensor:
        """The update of each fused matrix by itself."""
        updates = []
        for matrix in stack.split(heights, -2):
            scale = 0.2 * max(matrix.shape[-2:]) ** 0.5
            updates.append((self.orthogonalize(matrix.flatten(0, -3)) * scale).reshape(matrix.shape))
        return torch.cat(updates, -2)


OPTIMIZERS = {"adamw": AdamW, "muon": Muon}
