"""Text from a model: sampling with a key/value cache, and conversations; and scores of it (score.py).

    python generate.py --run runs/default --prompt "The function returns"
    python generate.py --run meta-llama/Llama-3.2-1B-Instruct --chat --prompt "What is a list?" "And a tuple?"
    python generate.py --run runs/default --chat          a conversation: Ctrl-C stops an answer, Ctrl-D ends it
    torchrun --nproc-per-node 8 -- generate.py --run runs/default --score questions.jsonl        or one process: python

The texts of a run begin with BOS, like the documents that it was trained on. The texts of a Hugging Face folder begin
and end as in transformers.

A model computes nonsense at positions that it was not trained on. Therefore, once a text is as long as the rows of the
training, the model goes on as if the text began with its newer half."""

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from base.disk import read_json
from base.errors import Parser, UserError, check_words, prepare_python, run_script, within
from base.hub import local_path

# ---- the command line, understood before torch is imported, which takes seconds

FLAGS = {
    "--run": dict(required=True, metavar="NAME", help="run folder, Hugging Face folder, or hub id"),
    "--prompt": dict(nargs="+", metavar="TEXT", help="beginnings of texts; with --chat: messages of one conversation"),
    "--chat": dict(action="store_true", help="a conversation; without --prompt, each line of the input is a message"),
    "--system": dict(metavar="TEXT", help="the system message of a conversation (implies --chat)"),
    "--score": dict(metavar="FILE", help="score the rows of a file, as score.py describes them, instead of sampling"),
    "--out": dict(metavar="FILE", help="a file for the results of each row of --score"),
    "--tokens": dict(default=300, type=within(int, 1), help="new tokens at most (%(default)s)"),
    "--temperature": dict(default=0.8, type=within(float, 0), help="0 = always the most probable token (%(default)s)"),
    "--top_k": dict(default=0, type=within(int, 0), help="choose among the k most probable tokens (0 = all)"),
    "--top_p": dict(
        default=0.95, type=within(float, 1e-9, 1), help="or among as many as together are this probable (%(default)s)"
    ),
    "--seed": dict(default=0, type=within(int, -(2**53)), help="of the choices (%(default)s)"),
    "--tokenizer": dict(metavar="NAME", help="as for train.py, instead of the model's own"),
    "--dtype": dict(default="auto", choices=("auto", "bf16", "fp32"), help="auto = as trained or stored"),
}


def parse(argv: list[str]) -> argparse.Namespace:
    args = Parser(FLAGS, prog="generate.py", description=__doc__.splitlines()[0]).parse_args(argv)
    args.chat |= args.system is not None
    if args.score and (args.prompt or args.chat) or args.out and not args.score:
        raise UserError("--score goes without --prompt and --chat, and --out belongs to --score")
    return args


if __name__ == "__main__":
    prepare_python()
    check_words(parse)

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import score
from attention import WITHOUT_CUDNN
from base.ranks import init_ranks, leave, on_every_rank
from checkpoint import newest
from config import Config
from dataset.prepare import knows_text, warn_once
from hf.chat import chat_template, render_chat
from hf.families import read_config
from hf.tokenizer import load_tokenizer
from hf.weights import Read, empty_model, open_trained, open_weights
from job.job import Run
from log import logger
from model import Transformer
from optim import DTYPES
from shapes import ModelConfig
from shard import fill_parameters, free_gathered, uncompiled, whole_rows

SAMPLING = {"n": 200, "temperature": 0.8, "top_p": 0.95}  # of a run's samples


class KVCache:
    """Keys and values of one layer for the tokens so far; with a window of W positions, for the last W.
    `Transformer.logits` takes a list with one cache per layer. The first call may add many tokens, each later call adds
    one."""

    def __init__(self, window: int = 0):
        self.window, self.length, self.kv = window, 0, None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, T, K, h] of the next tokens -> keys and values that these tokens may see, [B, S, K, h]."""
        assert self.kv is None or k.shape[1] == 1
        new = torch.stack((k, v)).transpose(2, 3)
        seen = new if self.kv is None else torch.cat((self.kv, new), 3)  # [2, B, K, S, h]
        self.kv = seen[:, :, :, -self.window :]  # all without a window
        self.length += k.shape[1]
        keys, values = (seen if k.shape[1] > 1 else self.kv).transpose(2, 3)
        return keys, values


def choose_token(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """logits [B, V] -> ids [B] on the CPU. temperature 0: the most probable; top_k: among that many (0 = all); top_p:
    among the most probable that together reach this probability (nucleus sampling, arXiv 1904.09751)."""
    if temperature == 0:
        return logits.argmax(-1).cpu()
    ordered, index = (logits.float().cpu() / temperature).sort(-1, descending=True)
    if top_k:
        ordered[:, top_k:] = float("-inf")
    p = ordered.softmax(-1)
    if top_p < 1:
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    return torch.multinomial(torch.zeros_like(p).scatter(-1, index, p), 1, generator=generator)[:, 0]


@torch.no_grad()
def sample(
    model: Transformer,
    ids: Tensor,
    n: int,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """ids [B, T] -> yields n times the next ids [B], on the CPU. The model reads at most `context` tokens at a time.

    All ranks must call, and take the same number of ids: sharded models compute each forward pass together."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text, cache = ids, []
    for _ in range(n):
        if not cache or cache[0].length + ids.shape[1] > context:
            if text.shape[1] > context:
                half = max(1, context // 2)
                warn_once(f"After {context} tokens, as in training, the model sees only the last {half} to {context}")
                ids = text[:, -half:]
            cache = [KVCache(block.self_attn.window) for block in model.layers]
        with uncompiled(), sdpa_kernel(WITHOUT_CUDNN):  # cuDNN would plan a kernel for every length
            logits = model.logits(ids.to(device), cache=cache, last=True)[:, -1]
        new = choose_token(logits, temperature, top_k, top_p, generator)
        yield new
        ids = new[:, None]
        text = torch.cat((text, ids), 1)


def generate_text(
    model: Transformer, tokenizer, prompt: list[int], continues: bool, stop: Iterable[int] = (), **how
) -> Iterator[str]:
    """The text after a prompt, in pieces: a piece for each new token before the first id of `stop`, then the rest of an
    incomplete character. continues: the prompt ends within the text. how: arguments of `sample`."""
    decode = tokenizer.decoder()
    if continues:
        for token in prompt:  # without them, the space before the first word would be missing
            decode(token)
    for new in sample(model, torch.tensor([prompt]), **how):
        token = new.item()
        if token in stop:
            break
        yield decode(token)
    yield decode(None)


def write_samples(config: Config, run: Run, model: Transformer, step: int) -> str:
    """A text of the model in training, which is also logged and added to samples.txt. All ranks must call: sharded
    layers are gathered for every token."""
    with run.phase("samples"):
        tokenizer = load_tokenizer(config.tokenizer)
        ids = [tokenizer.bos_id, *tokenizer.encode(config.prompt)]
        how = SAMPLING | {"context": config.trained_length(model.config), "seed": config.seed + step}
        model.eval()
        # Without `stop`, because all ranks must sample the same number of tokens.
        with whole_rows(model):
            text = config.prompt + "".join(generate_text(model, tokenizer, ids, True, **how))
        free_gathered(model)
        model.train()
        if run.ranks.rank == 0:
            logger.info("Sample after step %d:\n%s", step, text)
            with open(run.folder / "samples.txt", "a", encoding="utf-8") as f:
                f.write(f"--- step {step}\n{text}\n")
    return text


# ---- the model that --run names


class Source(NamedTuple):
    """A model that is not read yet, and how its texts begin and end."""

    config: ModelConfig
    read: Read
    dtype: torch.dtype
    tokenizer: object
    context: int  # tokens of the longest text that it was trained on
    bos: bool  # whether a text begins with BOS
    stop: Iterable[int]


def open_source(spec: str, tokenizer: str | None, chat: bool = False) -> Source:
    """spec: a run folder (its newest intact checkpoint, in the dtype that the run computed in), or a Hugging Face
    folder or hub id (in the dtype that config.json names; float16 is computed in fp32). tokenizer: None for its own.

    Like with transformers, a text of a Hugging Face folder ends at the eos_token_id of generation_config.json, or else
    of config.json. chat: it also ends at the end of a turn."""
    folder = local_path(spec, "--run")
    is_run = (folder / "checkpoints").is_dir()
    if is_run:
        saved = newest(folder)
        config, shape, read = saved.config, saved.model_config, open_trained(saved)
        if not (tokenizer or knows_text(config)):
            raise UserError(f"--run {folder} was trained on token shards: name the --tokenizer that made them")
        print(f"{folder}, step {saved.step}", file=sys.stderr)
        own_tokenizer, context = config.tokenizer, config.trained_length(shape)
        dtype = DTYPES.get(config.dtype, torch.float32)
    else:
        shape, values = read_config(folder), read_json(folder / "config.json")
        read, own_tokenizer, context = open_weights(folder, shape), str(folder), shape.max_seq_len
        dtype = torch.bfloat16 if "bfloat16" in (values.get("dtype"), values.get("torch_dtype")) else torch.float32
    tokens = load_tokenizer(tokenizer or own_tokenizer)
    if tokens.vocab_size > shape.vocab_size:
        raise UserError(f"--run {spec}: the tokenizer has {tokens.vocab_size} ids, the model {shape.vocab_size}")
    stop = tokens.stop_ids if is_run or chat else tokens.eos_ids
    return Source(shape, read, dtype, tokens, context, is_run or tokens.adds_bos, stop)


# ---- the command line


def write_answer(model: Transformer, source: Source, ids: list[int], number: int, args: argparse.Namespace) -> str:
    """Prints the text after a prompt, token by token -> the text. Ctrl-C stops an answer to a typed message."""
    chosen = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "seed": args.seed + number}
    how = {"n": args.tokens, "context": source.context, "stop": source.stop, **chosen}
    pieces = []
    try:
        for piece in generate_text(model, source.tokenizer, ids, not args.chat, **how):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if args.prompt or not args.chat:
            raise
    print()
    if len(pieces) > args.tokens:
        print(f"(stopped after --tokens {args.tokens})", file=sys.stderr)
    return "".join(pieces)


def typed_lines() -> Iterator[str]:
    """The lines of standard input, without empty ones."""
    with contextlib.suppress(EOFError):
        while True:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                yield line


def converse(model: Transformer, source: Source, args: argparse.Namespace) -> None:
    """Answers the messages of --prompt, or else each line of standard input."""
    template = chat_template(source.tokenizer, source.config.chat_format)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    for message in args.prompt or typed_lines():
        if args.prompt and len(args.prompt) > 1:
            print(">", message)
        messages.append({"role": "user", "content": message})
        ids, _ = render_chat(source.tokenizer, messages, template, notes=(notes := []))
        for note in notes:
            warn_once(": ".join(note))
        answer = write_answer(model, source, ids, len(messages), args)
        if answer.strip():
            messages.append({"role": "assistant", "content": answer})
        else:
            messages.pop()


def main(argv: list[str]) -> None:
    args, ranks = parse(argv), init_ranks()
    source = open_source(args.run, args.tokenizer, args.chat)
    rows = on_every_rank(lambda: score.read_rows(args.score, "--score", source), ranks) if args.score else None
    model = empty_model(source.config, DTYPES.get(args.dtype) or source.dtype, ranks.device)
    fill_parameters(model, source.read)
    if args.score:
        results = score.score(model, rows, ranks, shows=True)
        if ranks.rank == 0:
            score.report(results, args.out)
        return leave(ranks)
    if args.chat:
        return converse(model, source, args)
    texts = args.prompt or [""]
    for i, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- text {i} of {len(texts)}")
        ids = source.tokenizer.encode(text)
        if source.bos or not ids:
            ids = [source.tokenizer.bos_id, *ids]
        print(text, end="", flush=True)
        write_answer(model, source, ids, i, args)


if __name__ == "__main__":
    run_script(main)
