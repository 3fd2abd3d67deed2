"""Text from a model: samples, conversations, answers to a file of prompts; and scores of texts (score.py).

    python generate.py --run runs/default --prompt "The function returns"
    python generate.py --run meta-llama/Llama-3.2-1B-Instruct --chat --prompt "What is a list?" "And a tuple?"
    python generate.py --run runs/default --chat          a conversation: Ctrl-C stops an answer, Ctrl-D ends it
    python generate.py --run runs/default --prompts prompts.jsonl --samples 8 --reward rules.py:score --out answers
    torchrun --nproc-per-node 8 -- generate.py --run runs/default --score questions.jsonl        or one process: python

The texts of a run begin with BOS, like the documents that it was trained on. The texts of a Hugging Face folder begin
and end as in transformers.

A model computes nonsense at positions that it was not trained on. Therefore, once a text is as long as the rows of the
training, the model continues as if the text began with its newer half."""

import argparse
import contextlib
import json
import math
import runpy
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import NamedTuple

from base.disk import plural, read_json, write_json, write_whole
from base.errors import Failure, Parser, UserError, check_words, prepare_python, run_script, within
from base.hub import local_path

# ---- the command line, understood before torch is imported, which takes seconds

FLAGS = {
    "--run": dict(required=True, metavar="NAME", help="run folder or its checkpoint, Hugging Face folder, or hub id"),
    "--prompt": dict(nargs="+", metavar="TEXT", help="beginnings of texts; with --chat: messages of one conversation"),
    "--chat": dict(action="store_true", help="a conversation; without --prompt, each line of the input is a message"),
    "--system": dict(metavar="TEXT", help="the system message of a conversation (implies --chat)"),
    "--prompts": dict(metavar="FILE", help="answers the prompt, or the messages, of each row of a file, into --out"),
    "--score": dict(metavar="FILE", help="score the rows of a file, as score.py describes them, instead of sampling"),
    "--out": dict(
        metavar="NAME", help="folder for the answers to --prompts, which continues after a kill; file for --score"
    ),
    "--samples": dict(default=1, type=within(int, 1), help="answers to each of the --prompts (%(default)s)"),
    "--reward": dict(metavar="FILE.py:NAME", help="NAME(prompt, answer, row) -> a number; also writes best and pairs"),
    "--stop": dict(nargs="+", default=[], metavar="TEXT", help="an answer to --prompts also ends before these texts"),
    "--batch": dict(
        default=32, type=within(int, 1), help="answers to --prompts that are sampled together (%(default)s)"
    ),
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


ALWAYS = "run", "tokenizer", "dtype"
SAMPLES = "chat", "system", "temperature", "top_k", "top_p", "tokens", "seed"
# The other flags that have an effect, by task.
USED = {
    "with --prompts": ("prompts", "out", "samples", "reward", "stop", "batch", *SAMPLES),
    "with --score": ("score", "out"),
    "without --prompts or --score": ("prompt", *SAMPLES),
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(FLAGS, prog="generate.py", description=__doc__.splitlines()[0])
    args = parser.parse_args(argv)
    with_prompts, with_score, alone = USED
    task = with_prompts if args.prompts else with_score if args.score else alone
    for name, value in vars(args).items():
        if value != parser.get_default(name) and name not in (*ALWAYS, *USED[task]):
            raise UserError(f"--{name} has no effect {task}")
    if args.prompts and not args.out:
        raise UserError("--prompts needs --out, a folder for the answers")
    if "" in args.stop:
        raise UserError("--stop: every answer holds an empty text")
    args.chat |= args.system is not None
    args.how = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")}
    return args


if __name__ == "__main__":
    prepare_python()
    check_words(parse)

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import score
from attention import WITHOUT_CUDNN
from base.ranks import Ranks, init_ranks, leave, on_every_rank, on_first_rank
from checkpoint import newest
from config import Config
from dataset.prepare import read_rows, warn_once
from hf.chat import PROMPTS, chat_template, make_conversation, render_chat, take_prompt
from hf.families import read_config
from hf.tokenizer import load_tokenizer
from hf.weights import Read, make_model, open_trained, open_weights
from job.job import Run
from log import logger
from model import Transformer
from optim import DTYPES
from shapes import ModelConfig
from shard import free_gathered, uncompiled, whole_rows

SAMPLE_TOKENS, SAMPLING = 200, {"temperature": 0.8, "top_p": 0.95}  # of a run's samples


@dataclass
class KVCache:
    """Keys and values of one layer for the tokens so far; with a window of W positions, for the last W.
    `Transformer.logits` takes a list with one cache per layer. The first call may add many tokens, each later call adds
    one. Rows of different lengths end at the same place."""

    window: int = 0
    length: int = 0
    kv: Tensor | None = None  # [2, B, K, S, h]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [B, T, K, h] of the next tokens -> keys and values that these tokens may see, [B, S, K, h]."""
        assert self.kv is None or k.shape[1] == 1
        new = torch.stack((k, v)).transpose(2, 3)
        seen = new if self.kv is None else torch.cat((self.kv, new), 3)  # [2, B, K, S, h]
        self.kv = seen[:, :, :, -self.window :]  # all without a window
        self.length += k.shape[1]
        keys, values = (seen if k.shape[1] > 1 else self.kv).transpose(2, 3)
        return keys, values

    def keep(self, rows: list[int], length: int) -> None:
        """Drops the other rows, and all but the last `length` places."""
        self.kv, self.length = self.kv[:, rows, :, -length:], length


class Text:
    """A text that `sample` continues by at most n tokens. It ends with an id of `stop`, or before a text of
    `stop_texts`. continues: the prompt ends within the text.

    ids: those that the model sees. answer: the whole characters after the prompt. random: for its choices alone.
    finish: empty until the text ends; then stop, or length after n tokens."""

    def __init__(
        self, tokenizer, prompt: list[int], n: int, seed: int | str, continues: bool, stop: Iterable[int] = (),
        stop_texts: Iterable[str] = (),
    ):  # fmt: skip
        self.ids, self.left, self.random, self.stop, self.stop_texts = [*prompt], n, Random(seed), stop, stop_texts
        self.answer, self.finish, self.decode = "", "", tokenizer.decoder()
        if continues:
            for token in prompt:  # without them, the space before the first word would be missing
                self.decode(token)

    def add(self, token: int) -> None:
        self.ids.append(token)
        self.left -= 1
        if token in self.stop:
            self.finish = "stop"
        else:
            self.answer += self.decode(token)
            self.finish = "" if self.left else "length"
        if self.finish:
            self.answer += self.decode(None)  # the rest of an incomplete character
        for end in self.stop_texts:
            if end in self.answer:
                self.answer, self.finish = self.answer.partition(end)[0], "stop"


def choose_token(
    logits: Tensor, draws: list[float], temperature: float, top_k: int = 0, top_p: float = 1.0
) -> list[int]:
    """logits [B, V], a random number in [0, 1) for each row -> ids [B]. temperature 0: the most probable; top_k: among
    that many (0 = all); top_p: among the most probable that together reach this probability (nucleus sampling, arXiv
    1904.09751)."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    ordered, index = (logits.float() / temperature).sort(-1, descending=True)
    if top_k:
        ordered[:, top_k:] = float("-inf")
    p = ordered.softmax(-1).double()
    reached = p.cumsum(-1)
    total = reached.masked_fill(reached - p >= top_p, 0).amax(-1)
    place = torch.searchsorted(reached, (total.new_tensor(draws) * total)[:, None])
    return index.gather(-1, place)[:, 0].tolist()


@torch.no_grad()
def sample(model: Transformer, texts: list[Text], context: int, **how) -> Iterator[None]:
    """Adds a token to each text again and again, until all have ended; yields after each. The model reads at most
    `context` tokens at a time. how: arguments of `choose_token`. Texts of different lengths end at the same place:

        . . a a a      each empty place before a shorter text is a separate document, which the text does not see
        b b b b b

    All ranks of a sharded model must call, with equal texts: they compute each forward pass together."""
    device, cache = next(model.parameters()).device, []
    while rows := [i for i, text in enumerate(texts) if not text.finish]:
        some_ended, texts = len(rows) < len(texts), [texts[i] for i in rows]
        for text in texts:
            if len(text.ids) > context:
                half = max(1, context // 2)
                warn_once(f"After {context} tokens, as in training, the model sees only the last {half} to {context}")
                text.ids, cache = text.ids[-half:], []
        lengths = torch.tensor([[len(text.ids)] for text in texts], device=device)
        longest = int(lengths.max())
        if some_ended:
            for layer in cache:
                layer.keep(rows, longest - 1)
        cache = cache or [KVCache(block.self_attn.window) for block in model.layers]
        begin, positions = cache[0].length, None
        if lengths.min() < longest:
            positions = (torch.arange(begin, longest, device=device) - longest + lengths).clamp(min=0)
        ids = torch.tensor([([0] * longest + text.ids)[begin - longest :] for text in texts], device=device)
        with uncompiled(), sdpa_kernel(WITHOUT_CUDNN):  # cuDNN would plan a kernel for every length
            logits = model.logits(ids, positions, cache, last=True)[:, -1]
        draws = [text.random.random() for text in texts]
        for text, token in zip(texts, choose_token(logits, draws, **how), strict=True):
            text.add(token)
        yield


def write_samples(config: Config, run: Run, model: Transformer, step: int) -> str:
    """A text of the model in training, which is also logged. All ranks must call: sharded layers are gathered for every
    token."""
    with run.phase("samples"):
        tokenizer = load_tokenizer(config.tokenizer)
        ids = [tokenizer.bos_id, *tokenizer.encode(config.prompt)]
        text = Text(tokenizer, ids, SAMPLE_TOKENS, config.seed + step, True)
        model.eval()
        # Without `stop`, because all ranks must sample the same number of tokens.
        with whole_rows(model):
            for _ in sample(model, [text], config.trained_length(model.config), **SAMPLING):
                pass
        text = config.prompt + text.answer
        free_gathered(model)
        model.train()
        logger.info("Sample after step %d:\n%s", step, text)
    return text


# ---- the model that --run names


class Source(NamedTuple):
    """A model that is not read yet, and how its texts begin and end."""

    name: str
    config: ModelConfig
    read: Read
    dtype: torch.dtype
    tokenizer: object
    context: int  # tokens of the longest text that it was trained on
    bos: bool  # whether a text begins with BOS
    stop: Iterable[int]

    def load(self, dtype: str, ranks: Ranks) -> Transformer:
        return make_model(self.config, self.read, DTYPES.get(dtype) or self.dtype, ranks.device)

    def encode(self, text: str) -> list[int]:
        """The ids of a text that the model continues."""
        ids = self.tokenizer.encode(text)
        return [self.tokenizer.bos_id, *ids] if self.bos or not ids else ids

    def read_prompt(self, fields: dict, chat: bool = False) -> tuple[list[int], str | list[dict]]:
        """Takes the prompt out of the fields of a row -> (its ids, its text or messages). A text is continued; with
        `chat` or a system message it is a message of the user. The answer at the end of a conversation is left out."""
        prompt = take_prompt(fields)
        if prompt == []:
            raise UserError(f"the prompt is missing or empty: expected a field of {', '.join(PROMPTS)}")
        if isinstance(prompt, str) and not (chat or fields.get("system")):
            return self.encode(prompt), prompt
        messages, inputs, _ = make_conversation(fields, [prompt])
        if messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return self.render(messages, inputs), messages

    def render(self, messages: list[dict], inputs: dict | None = None) -> list[int]:
        """The ids of a conversation with the prompt for an answer. inputs: of its template."""
        template = chat_template(self.tokenizer, self.config.chat_format)
        ids, _ = render_chat(self.tokenizer, messages, template, inputs, notes := [])
        for note in notes:
            warn_once(": ".join(note))
        return ids


def open_source(spec: str, tokenizer: str | None, chat: bool = False) -> Source:
    """spec: a run folder (its newest intact checkpoint) or a checkpoint (in the dtype that the run computed in), or a
    Hugging Face folder or hub id (in the dtype that config.json names; float16 is computed in fp32). tokenizer: None
    for its own.

    Like with transformers, a text of a Hugging Face folder ends at the eos_token_id of generation_config.json, or else
    of config.json. chat: it also ends at the end of a turn."""
    folder = local_path(spec, "--run")
    is_run = (folder / "checkpoints").is_dir() or (folder / "manifest.json").is_file()
    if is_run:
        saved = newest(folder)
        config, shape, read = saved.config, saved.model_config, open_trained(saved)
        tokenizer = tokenizer or saved.tokenizer
        if not tokenizer:
            raise UserError(f"--run {folder} was trained on token shards: name the --tokenizer that made them")
        name = f"{folder}, step {saved.step}"
        context, dtype = config.trained_length(shape), DTYPES.get(config.dtype, torch.float32)
    else:
        name, shape, values = str(folder), read_config(folder), read_json(folder / "config.json")
        read, tokenizer, context = open_weights(folder, shape), tokenizer or name, shape.max_seq_len
        dtype = torch.bfloat16 if "bfloat16" in (values.get("dtype"), values.get("torch_dtype")) else torch.float32
    tokens = load_tokenizer(tokenizer)
    if tokens.vocab_size > shape.vocab_size:
        raise UserError(f"--run {spec}: the tokenizer has {tokens.vocab_size} ids, the model {shape.vocab_size}")
    stop = tokens.stop_ids if is_run or chat else tokens.eos_ids
    return Source(name, shape, read, dtype, tokens, context, is_run or tokens.adds_bos, stop)


# ---- the command line


def write_answer(model: Transformer, source: Source, ids: list[int], number: int, args: argparse.Namespace) -> str:
    """Prints the text after a prompt, token by token -> the text. Ctrl-C stops an answer to a typed message."""
    text, shown = Text(source.tokenizer, ids, args.tokens, args.seed + number, not args.chat, source.stop), 0
    try:
        for _ in sample(model, [text], source.context, **args.how):
            print(text.answer[shown:], end="", flush=True)
            shown = len(text.answer)
    except KeyboardInterrupt:
        if args.prompt or not args.chat:
            raise
    print()
    if text.finish == "length":
        print(f"(stopped after --tokens {args.tokens})", file=sys.stderr)
    return text.answer


def converse(model: Transformer, source: Source, args: argparse.Namespace) -> None:
    """Answers the messages of --prompt, or else each line of standard input that is not empty."""
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    typed = iter(lambda: input("> " if sys.stdin.isatty() else ""), None)
    with contextlib.suppress(EOFError):
        for message in args.prompt or filter(str.strip, typed):
            if args.prompt and len(args.prompt) > 1:
                print(">", message)
            messages.append({"role": "user", "content": message})
            answer = write_answer(model, source, source.render(messages), len(messages), args)
            if answer.strip():
                messages.append({"role": "assistant", "content": answer})
            else:
                messages.pop()


# ---- a file of prompts


def answer_prompts(args: argparse.Namespace, source: Source, ranks: Ranks) -> None:
    """Samples the answers that are missing in --out. Which of them share a batch depends on the prompts only, and each
    has random numbers of its own: neither ranks nor a kill change an answer. All ranks must call."""
    from huggingface_hub.utils import tqdm

    def read(row: dict) -> tuple[list[int], dict, dict]:
        """-> (the ids of the prompt, the fields with `prompt` in one form, the row)"""
        fields = {"system": args.system} | row
        ids, prompt = source.read_prompt(fields, args.chat)
        # The messages have `system`. Training would read another form of the prompt before the new answer.
        others = {name: value for name, value in fields.items() if name not in (*PROMPTS, "system")}
        return ids, {"prompt": prompt} | others, row

    reward = load_reward(args.reward) if args.reward else None
    prompts = on_every_rank(lambda: read_rows(args.prompts, "--prompts", read), ranks)
    on_first_rank(lambda: begin_answers(args, source.name, prompts), ranks)
    todo = [(n, k) for n in range(len(prompts)) for k in range(args.samples)]
    batches = {Path(args.out, f"batches/{i}.json"): todo[i : i + args.batch] for i in range(0, len(todo), args.batch)}
    missing = on_first_rank(lambda: [file for file in batches if not file.exists()], ranks)
    model = source.load(args.dtype, ranks)

    def answer() -> None:
        for file in tqdm(missing[ranks.rank :: ranks.world_size], unit="batch", disable=ranks.rank > 0):
            texts = []
            for n, k in batches[file]:
                ids, fields, _ = prompts[n]
                how = args.tokens, f"{args.seed} {n} {k}", isinstance(fields["prompt"], str), source.stop, args.stop
                texts.append(Text(source.tokenizer, ids, *how))
            for _ in sample(model, texts, source.context, **args.how):
                pass
            write_json(file, {"answers": [(text.answer, text.finish) for text in texts]})

    on_every_rank(answer, ranks)  # the results need the batches of all ranks
    on_first_rank(lambda: write_results(args, prompts, batches, reward), ranks)


def begin_answers(args: argparse.Namespace, model: str, prompts: list) -> None:
    """Makes --out, or refuses one whose answers were made with other flags. Another --reward judges the same ones."""
    settings = vars(args) | {"reward": None, "model": model, "prompts_crc32": zlib.crc32(str(prompts).encode())}
    path = Path(args.out, "settings.json")
    if path.parent.exists() and read_json(path) != settings:
        raise UserError(f"--out {args.out} exists, without answers made with these flags: give a new folder")
    Path(args.out, "batches").mkdir(parents=True, exist_ok=True)
    write_json(path, settings)


def load_reward(spec: str) -> Callable:
    """spec: FILE.py:NAME -> the function, which runs in this process."""
    file, _, name = spec.rpartition(":")
    try:
        return runpy.run_path(file)[name]
    except (OSError, KeyError) as e:
        raise UserError(f"--reward {spec}: expected FILE.py:NAME, a function of that file ({e!r})") from None


def write_results(args: argparse.Namespace, prompts: list, batches: Iterable[Path], reward: Callable | None) -> None:
    """Writes answers.jsonl; with a reward also best.jsonl, rows for fine-tuning, and pairs.jsonl, rows for --dpo."""
    answers = iter([answer for file in batches for answer in read_json(file)["answers"]])
    files = {"answers": []} | ({"best": [], "pairs": []} if reward else {})
    for _, fields, row in prompts:
        group = []
        for k in range(args.samples):
            completion, finish = next(answers)
            group.append(fields | {"sample": k, "completion": completion, "finish": finish})
            if isinstance(fields["prompt"], str):
                group[k]["text"] = fields["prompt"] + completion  # for --text_field text
            if reward:
                group[k]["reward"] = value = float(reward(fields["prompt"], completion, row))
                if not math.isfinite(value):
                    raise Failure(f"--reward {args.reward} gives {value} for {row!r:.200}")
        files["answers"] += group
        if reward:
            ordered = sorted(group, key=itemgetter("reward"))
            worst, best = ordered[0], ordered[-1]
            if best["completion"].strip():  # else there is nothing to train on
                files["best"].append(best)
            if best["reward"] > worst["reward"]:
                files["pairs"].append(best | {"chosen": best["completion"], "rejected": worst["completion"]})
    for name, rows in files.items():
        lines = [json.dumps(row, default=str) + "\n" for row in rows]  # rows of .parquet may hold dates
        write_whole(Path(args.out, f"{name}.jsonl"), "".join(lines))
        print(f"{args.out}/{name}.jsonl: {plural(len(rows), 'row')}")


def main(argv: list[str]) -> None:
    args, ranks = parse(argv), init_ranks()
    source = open_source(args.run, args.tokenizer, args.chat or args.prompts)
    if args.prompts:
        answer_prompts(args, source, ranks)
    elif args.score:
        rows = on_every_rank(lambda: score.read_questions(args.score, "--score", source), ranks)
        out = args.out and Path(args.out)
        if out and on_first_rank(lambda: out.exists() or not out.parent.exists(), ranks):
            raise UserError(f"--out {out} exists, or its folder does not: give a new file")
        results = score.score(source.load(args.dtype, ranks), rows, ranks, shows=True)
        if ranks.rank == 0:
            score.report(results, args.out)
    elif args.chat:
        converse(source.load(args.dtype, ranks), source, args)
    else:
        model, texts = source.load(args.dtype, ranks), args.prompt or [""]
        for i, text in enumerate(texts, 1):
            if len(texts) > 1:
                print(f"--- text {i} of {len(texts)}")
            print(text, end="", flush=True)
            write_answer(model, source, source.encode(text), i, args)
    leave(ranks)


if __name__ == "__main__":
    run_script(main)
