"""Text from a model: sampling with a key/value cache.

python generate.py --run runs/default --prompt "The function returns"
"""

import argparse
import codecs
import sys
from collections.abc import Iterator
from pathlib import Path

from errors import UserError  # first: it finds the Python that has torch

import torch  # isort: skip
from torch import Tensor

from config import Config
from model import KVCache, Transformer


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """logits [B, V] -> ids [B] on the CPU. temperature 0: the most probable; top_k: among that many (0 = all); top_p:
    among the most probable ones that together reach this probability (nucleus sampling, arXiv 1904.09751)."""
    logits = logits.float().cpu()
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, index = logits.softmax(-1).sort(-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(drop.scatter(-1, index, drop), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # a compiled block would be compiled again for every length
def sample(
    model: Transformer, ids: Tensor, n: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0
) -> Iterator[Tensor]:
    """ids [B, T] -> yields n times the next ids [B], on the CPU. All ranks must call and go through to the end: each
    token is a forward pass that sharded models compute together, so nobody stops early."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    cache = KVCache(model.config, ids.shape[0], ids.shape[1] + n, model.dtype, device)
    for _ in range(n):
        ids = choose(model.logits(ids.to(device), cache=cache)[:, -1], temperature, top_k, top_p, generator)
        yield ids
        ids = ids[:, None]


def check_length(model_config, prompt: int, n: int) -> None:
    if model_config.positions == "learned" and prompt + n > model_config.max_seq_len:
        raise UserError(
            f"prompt ({prompt} tokens) + {n} new ones: the model has {model_config.max_seq_len} learned positions"
        )


def load_run(run: Path, device: torch.device) -> tuple[Config, Transformer, int]:
    """-> (settings, model, step) of a run's newest whole checkpoint."""
    from checkpoint import Checkpoint, folders, verify
    from shard import fill

    good = [step for step, ok, _ in verify(run) if ok]
    if not good:
        raise UserError(
            f"--run {run}: there is no whole checkpoint in it{'' if folders(run) else ' (runs/NAME is a run folder)'}"
        )
    found = Checkpoint(run / "checkpoints" / f"step-{good[-1]:08d}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in found.manifest["config"].items()}
    config = Config(**values)
    model = Transformer(config.model_config, torch.bfloat16 if config.dtype == "bf16" else torch.float32)
    fill(model, found.read_weights)
    return config, model.to(device).eval(), found.step


def main(argv: list[str]) -> None:
    from machine import find_device
    from tokenizer import load_tokenizer

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--run", required=True, type=Path, help="run folder")
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--tokens", default=300, type=int, help="how many new tokens")
    parser.add_argument("--temperature", default=0.8, type=float, help="0 = always the most probable token")
    parser.add_argument("--top_k", default=0, type=int, help="choose among the k most probable tokens; 0 = all")
    parser.add_argument(
        "--top_p",
        default=0.95,
        type=float,
        help="choose among the most probable tokens that together have this probability",
    )
    parser.add_argument("--seed", default=0, type=int)
    args = parser.parse_args(argv)
    if args.temperature < 0 or not 0 < args.top_p <= 1 or args.top_k < 0 or args.tokens < 1:
        raise UserError("--temperature must be >= 0, --top_p in (0, 1], --top_k >= 0, --tokens >= 1")
    config, model, step = load_run(args.run, find_device(1))
    tokenizer = load_tokenizer(config.tokenizer)
    if not config.reads_text:
        raise UserError(
            f"--run {args.run} was trained on token shards: the one tokenizer there is, bytes, cannot read them"
        )
    ids = [tokenizer.bos_id, *tokenizer.encode(args.prompt)]
    check_length(model.config, len(ids), args.tokens)
    print(f"{args.run}, step {step}, {config.model}", file=sys.stderr)
    print(args.prompt, end="", flush=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character can be several tokens
    for token in sample(model, torch.tensor([ids]), args.tokens, args.temperature, args.top_k, args.top_p, args.seed):
        if token.item() in (tokenizer.eos_id, tokenizer.bos_id):
            break
        if token.item() < 256:  # a larger vocabulary's other ids were never trained
            print(decoder.decode(bytes([token.item()])), end="", flush=True)
    print()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(print(f"error: {error}", file=sys.stderr) or 2)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)
