"""Text from a model: sampling with a key/value cache, for several prompts at once.

    python generate.py --run runs/default --prompt "The function returns"
    python generate.py --run meta-llama/Llama-3.2-1B-Instruct --chat --prompt "What is a list?" "And a tuple?"
    python generate.py --run runs/default --chat          a conversation: Ctrl-C stops an answer, Ctrl-D ends it

A batch is right-aligned: shorter prompts have padding in front, which no token sees and which positions do not count,
so that each row's logits are those of its prompt alone. A run's texts begin with BOS, as its documents did; those of a
Hugging Face folder begin and end as transformers' do."""

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lib.errors import (  # first: it finds the Python that has torch
    Parser,
    UserError,
    check_words,
    local_path,
    read_json,
    run_script,
)

# ---- the command line, understood before torch is imported, which takes seconds


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="generate.py",
        description=__doc__.splitlines()[0],
        formatter_class=partial(argparse.HelpFormatter, width=100),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", required=True, metavar="NAME", help="run folder, Hugging Face folder, or hub id that is downloaded")
    add("--prompt", nargs="+", metavar="TEXT", help="what the text begins with; several: a text of each")
    add("--chat", action="store_true", help="a prompt is a user's message; without one, a conversation line by line")
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add("--tokens", default=300, type=int, help="how many new tokens at most (default: %(default)s)")
    add("--temperature", default=0.8, type=float, help="0 = always the most probable token (default: %(default)s)")
    add("--top_k", default=0, type=int, help="choose among the k most probable tokens; 0 = all (default: %(default)s)")
    top_p = "choose among the most probable that together have this probability (default: %(default)s)"
    add("--top_p", default=0.95, type=float, help=top_p)
    add("--seed", default=0, type=int, help="of the choices (default: %(default)s)")
    add("--tokenizer", metavar="NAME", help="as for train.py; default: the run's or the folder's own")
    add(
        "--dtype",
        default="auto",
        choices=("auto", "bf16", "tf32", "fp32"),
        help="auto = the run's or the weights' (default: auto)",
    )
    args = parser.parse_args(argv)
    if not (0 <= args.temperature < math.inf and 0 < args.top_p <= 1 and args.top_k >= 0 and args.tokens >= 1):
        raise UserError("--temperature must be >= 0, --top_p in (0, 1], --top_k >= 0, --tokens >= 1")
    if args.system is not None and not args.chat:
        raise UserError("--system is the beginning of a conversation: give --chat too")
    if args.chat and args.prompt and not all(args.prompt):
        raise UserError("--chat: give the user's message as --prompt, or leave that out for a conversation")
    return args


if __name__ == "__main__":
    check_words(parse)

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from attention import WITHOUT_CUDNN
from checkpoint import load_run_tokenizer, newest
from lib import torch_private
from lib.machine import find_device
from lib.run import Run
from lib.tokenizer import chat_family, load_tokenizer, render_chat
from lib.weights import Read, empty_model, open_weights, read_config
from log import logger
from model import Transformer, rope_table
from optim import DTYPES
from shapes import ModelConfig
from shard import fill_parameters, reshard

CHAT_ROOM = 2048  # tokens that a conversation's cache has room for, at first
SAMPLE_TOKENS, SAMPLING = 200, {"temperature": 0.8, "top_p": 0.95}  # of a run's samples


class LayerCache:
    """Keys and values of one layer for the tokens seen so far: [2, B, K, S, h], allocated once."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
        self.kv, self.length = torch.zeros(2, *shape, dtype=dtype, device=device), 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, T, K, h] of the next tokens -> those of all tokens so far, [B, S, K, h]."""
        start, self.length = self.length, self.length + k.shape[1]
        self.kv[:, :, :, start : self.length] = torch.stack((k, v)).transpose(2, 3)
        k, v = self.kv[:, :, :, : self.length].transpose(2, 3)
        return k, v


class KVCache:
    """What `Transformer.logits` needs in order to continue sequences without reading them again; `length` tokens are in
    it. padding [B]: the first so many tokens of each row are no text: nothing sees them, positions count after them.
    All of them, and what follows, are in the first call."""

    def __init__(self, model: Transformer, batch: int, max_len: int, padding: Tensor | None = None):
        config, device = model.config, next(model.parameters()).device
        shape = (batch, config.n_kv_heads, max_len, config.head_dim)
        self.layers = [LayerCache(shape, model.dtype, device) for _ in range(config.n_layers)]
        self.length, self.max_len, self.padded = 0, max_len, padding is not None
        self.slots = torch.arange(max_len, device=device)
        padding = padding.to(device)[:, None] if self.padded else torch.zeros(1, 1, dtype=torch.long, device=device)
        self.text = self.slots >= padding  # [B or 1, S], as are the positions
        self.positions = (self.slots - padding).clamp(min=0)
        self.rope = rope_table(config, self.positions) if config.positions == "rope" else None

    def keep(self, length: int) -> None:
        """Forgets all but the first so many tokens."""
        for cache in (self, *self.layers):
            cache.length = length

    def take(self, T: int) -> tuple[Tensor | None, Tensor, tuple[Tensor, Tensor] | None]:
        """Makes room for the next T tokens -> their mask, positions and rotary table."""
        mask, start = self._mask(T), self.length
        self.length += T
        rope = self.rope and tuple(table[:, start : self.length] for table in self.rope)
        return mask, self.positions[:, start : self.length], rope

    def _mask(self, T: int) -> Tensor | None:
        """Which of all tokens the next T see, [B or 1, 1, T, S]; None: plain causal attention among themselves."""
        stop = self.length + T
        if T == 1:
            return self.text[:, None, None, :stop]
        if not self.length and not self.padded:
            return None
        keys, own = self.slots[:stop], self.slots[self.length : stop, None]
        seen = (keys <= own) & self.text[:, None, :stop]
        return (seen | (keys == own))[:, None]  # padding sees itself, as a softmax over nothing is no number


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """logits [B, V] -> ids [B] on the CPU. temperature 0: the most probable; top_k: among that many (0 = all); top_p:
    among the most probable ones that together reach this probability (nucleus sampling, arXiv 1904.09751)."""
    if temperature == 0:
        return logits.argmax(-1).cpu()
    logits = logits.float().cpu() / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], float("-inf"))
    if top_p < 1:
        ordered, index = logits.softmax(-1).sort(-1, descending=True)
        drop = ordered.cumsum(-1) - ordered >= top_p
        logits = logits.masked_fill(drop.scatter(-1, index, drop), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _uncompiled():
    """Compiled blocks would be compiled again for every length. If nothing is compiled, the compiler is not loaded: it
    takes 0.2 GiB."""
    return torch.compiler.set_stance("force_eager") if torch_private.is_compiler_loaded() else contextlib.nullcontext()


@torch.no_grad()
def sample(
    model: Transformer,
    ids: Tensor,
    n: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Iterable[int] = (),
    padding: Tensor | None = None,
    cache: KVCache | None = None,
) -> Iterator[Tensor]:
    """ids [B, T] -> yields up to n times the next ids [B], on the CPU. padding [B]: a row begins after so many ids. A
    row that has drawn an id of `stop` repeats it, and when all rows have, it is the end. cache: with room for all of
    them, of what goes before ids.

    All ranks must call and go through to the end: each token is a forward pass that sharded models compute together, so
    nobody stops early, unless all draw the same ids."""
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    if cache is None:
        cache = KVCache(model, ids.shape[0], ids.shape[1] + n, padding)
    stop, ended = torch.tensor(sorted(stop)), None
    for _ in range(n):
        with _uncompiled(), sdpa_kernel(WITHOUT_CUDNN):  # cuDNN would plan a kernel for every length
            logits = model.logits(ids.to(device), cache=cache, last=True)[:, -1]
        new = choose(logits, temperature, top_k, top_p, generator)
        if ended is not None:
            new = torch.where(ended, ids[:, 0], new)
        yield new
        if len(stop):
            ended = torch.isin(new, stop)
            if ended.all():
                return
        ids = new[:, None]


def write(
    model: Transformer, tokenizer, prompts: list[list[int]], n: int, stop: Iterable[int], goes_on: bool, **choice
) -> Iterator[tuple[int, int | None, str]]:
    """The texts behind prompts (ids), as they grow -> (which prompt's, the next id, what its text grows by), until each
    has met an id of `stop` or has n tokens; at the end comes what is left of each text, without an id. goes_on: they
    are the prompts' next words, else they begin anew. choice: as in `sample`."""
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    decoders = [tokenizer.decoder() for _ in prompts]
    for decode, prompt in zip(decoders, prompts, strict=True):
        for token in prompt if goes_on else ():  # the space before the first word of a text would not be shown
            decode(token)
    uneven = torch.tensor(padding) if any(padding) else None
    for new in sample(model, ids, n, stop=stop, padding=uneven, **choice):
        for row, token in enumerate(new.tolist()):
            yield row, token, "" if token in stop else decoders[row](token)
    for row, decode in enumerate(decoders):
        yield row, None, decode(None)


def write_samples(model: Transformer, run: Run, step: int) -> str:
    """A text of the model in training, which goes to the log and samples.txt, too. All ranks must call: sharded layers
    are gathered for every token."""
    config = run.config
    with run.phase("samples"):
        tokenizer = load_tokenizer(config.tokenizer)
        ids = [tokenizer.bos_id, *tokenizer.encode(config.prompt)]
        n = min(SAMPLE_TOKENS, config.model_config.max_seq_len - len(ids))
        model.eval()
        pieces = write(model, tokenizer, [ids], n, (), True, **SAMPLING, seed=config.seed + step)  # no stop: all go on
        text = config.prompt + "".join(piece for *_, piece in pieces)
        reshard(model)
        model.train()
        if run.ranks.rank == 0:
            logger.info("Sample after step %d:\n%s", step, text)
            with open(run.folder / "samples.txt", "a", encoding="utf-8") as f:
                f.write(f"--- step {step}\n{text}\n")
    return text


def check_length(config: ModelConfig, prompt: int, n: int) -> None:
    if config.positions == "learned" and prompt + n > config.max_seq_len:
        raise UserError(
            f"prompt ({prompt} tokens) + {n} new ones: the model has {config.max_seq_len} learned positions; give fewer"
            " --tokens or a shorter prompt"
        )


# ---- what --run names


class Source(NamedTuple):
    """A model that is not read yet, and how its texts begin and end."""

    config: ModelConfig
    read: Read
    dtype: torch.dtype
    tokenizer: object
    bos: bool  # whether a text begins with BOS
    stop: frozenset[int]

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> Transformer:
        model = empty_model(self.config, dtype or self.dtype, device)
        fill_parameters(model, self.read)
        return model


def open_source(spec: str, tokenizer: str | None, chat: bool = False) -> Source:
    """spec: a run folder, a Hugging Face folder, or the hub id of one; tokenizer None: its own. chat: a text ends where
    a turn does, too."""
    folder = local_path(spec, "--run")
    if (folder / "checkpoints").is_dir():
        source = open_run(folder, tokenizer)
    elif (folder / "config.json").is_file():
        source = open_folder(folder, tokenizer, chat)
    else:
        raise UserError(
            f"--run {spec} holds neither checkpoints, as a run folder does, nor config.json: a model's folder"
        )
    ids, room = source.tokenizer.vocab_size, source.config.vocab_size
    if ids > room:
        raise UserError(
            f"--run {spec}: the tokenizer has {ids} ids, the model a vocabulary of {room}; name the --tokenizer that"
            " the model was trained with"
        )
    return source


def open_run(run: Path, tokenizer: str | None) -> Source:
    """The newest whole checkpoint, in the dtype that the run computed in."""
    found = newest(run)
    tokens = load_run_tokenizer(found, tokenizer)
    if tokens is None:
        raise UserError(f"--run {run} was trained on token shards: name the --tokenizer that made them")
    print(f"{run}, step {found.step}", file=sys.stderr)
    dtype = DTYPES.get(found.config.dtype, torch.float32)
    return Source(found.model_config, found.open_model(), dtype, tokens, True, frozenset(tokens.stop_ids))


def open_folder(folder: Path, tokenizer: str | None, chat: bool) -> Source:
    """In the dtype that config.json names, float16 as fp32. A text ends as with transformers: at the eos_token_id of
    generation_config.json, else config.json."""
    config, values = read_config(folder), read_json(folder / "config.json")
    tokens = load_tokenizer(tokenizer or str(folder))
    half = "bfloat16" in (values.get("dtype"), values.get("torch_dtype"))
    dtype = torch.bfloat16 if half else torch.float32
    stop = tokens.stop_ids - {tokens.bos_id} | {tokens.eos_id}
    stop = frozenset(stop if chat or not tokens.eos_ids else tokens.eos_ids)
    return Source(config, open_weights(folder, config), dtype, tokens, tokens.adds_bos, stop)


# ---- the command line


def read_prompt(source: Source, text: str) -> list[int]:
    ids = source.tokenizer.encode(text)
    return [source.tokenizer.bos_id, *ids] if source.bos or not ids else ids


def render(source: Source, before: list[dict], text: str) -> list[int]:
    """The ids of a conversation that goes on with a user's message."""
    messages = [*before, {"role": "user", "content": text}]
    return render_chat(source.tokenizer, messages, chat_family(source.tokenizer, source.config.chat_format))[0]


def converse(model: Transformer, source: Source, messages: list[dict], n: int, **choice) -> None:
    """Answers line after line of standard input until its end, with up to n tokens each. messages: what the
    conversation begins with. Of what the cache holds, the part with which the next prompt begins is not read again."""
    held, cache, config = [], None, source.config
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError as e:
            raise UserError(f"Standard input is not {e.encoding} at byte {e.start}: {e.object[:60]!r}") from None
        except KeyboardInterrupt:  # of what has been typed
            print()
            continue
        if not line.strip():
            continue
        ids = render(source, messages, line)
        room = n
        if config.positions == "learned":
            check_length(config, len(ids), 1)
            room = min(n, config.max_seq_len - len(ids))
        elif len(ids) > config.max_seq_len:
            print(f"({len(ids)} tokens: the model was made for {config.max_seq_len})", file=sys.stderr)
        if cache is None or cache.max_len < len(ids) + room:
            held, cache = [], KVCache(model, 1, max(CHAT_ROOM, 2 * (len(ids) + room)))
        known = min(len(os.path.commonprefix([held, ids])), len(ids) - 1)
        cache.keep(known)
        drawn, answer = [], ""
        try:
            new = write(model, source.tokenizer, [ids[known:]], room, source.stop, False, cache=cache, **choice)
            for _, token, piece in new:
                drawn += [] if token is None else [token]
                answer += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        print()
        held = (ids + drawn)[: cache.layers[-1].length]  # where Ctrl-C came, perhaps not all that were begun
        if answer.strip():
            messages = [*messages, {"role": "user", "content": line}, {"role": "assistant", "content": answer}]
        if len(drawn) == room and drawn[-1] not in source.stop:
            print(f"(cut off after {room} tokens)", file=sys.stderr)


def main(argv: list[str]) -> None:
    args = parse(argv)
    source = open_source(args.run, args.tokenizer, args.chat)
    opening = [{"role": "system", "content": args.system}] * (args.system is not None)
    talks = args.chat and not args.prompt
    texts = args.prompt or ["?" * talks]  # in a conversation it stands for what will be typed
    prompts = [render(source, opening, text) if args.chat else read_prompt(source, text) for text in texts]
    check_length(source.config, max(map(len, prompts)), 1 if talks else args.tokens)
    model = source.load(find_device(1), DTYPES.get(args.dtype))
    choice = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, seed=args.seed)
    if talks:
        return converse(model, source, opening, args.tokens, **choice)
    pieces = write(model, source.tokenizer, prompts, args.tokens, source.stop, not args.chat, **choice)
    begin = [""] * len(prompts) if args.chat else texts
    if len(prompts) == 1:
        for text in itertools.chain(begin, (text for *_, text in pieces), "\n"):
            print(text, end="", flush=True)
        return
    for row, _, text in pieces:
        begin[row] += text
    for row, text in enumerate(begin, 1):
        print(f"--- text {row} of {len(begin)}\n{text}")


if __name__ == "__main__":
    run_script(main)
