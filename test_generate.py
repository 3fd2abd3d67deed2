"""generate.py. Oracles: repeated argmax of the forward without a cache and transformers' generate for greedy text,
probabilities computed token by token for sampling, transformers and sentencepiece for the text of a folder."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path
from random import Random, getstate
from unittest.mock import Mock

import pytest
import sentencepiece
import tokenizers
import torch
import transformers
from tokenizers.processors import TemplateProcessing

import checkpoint
from base.disk import read_json
from base.errors import Message, UserError
from base.ranks import ALONE
from data import make_loader
from dataset.files import READERS
from dataset.prepare import warn_once, write_shard
from generate import Text, choose_token, main, open_source, sample
from hf.test_tokenizer import _json, _model
from hf.tokenizer import ByteTokenizer
from hf.weights import export_model, export_trained, load_model
from inputs import settled_args
from model import Transformer
from optim import make_optimizer
from test_checkpoint import save
from test_model import FAMILY, make_model, make_pair, make_reference, random_tokens, scramble
from test_shard import run_ranks

transformers.utils.logging.disable_progress_bar()

PROBABILITIES = [[0.5, 0.25, 0.125, 0.0625, 0.0625], [0.02, 0.4, 0.08, 0.35, 0.15], [0.001, 0.001, 0.99, 0.004, 0.004]]


def run(model, ids, n: int, context: int = 128, temperature: float = 0, stop=(), first: int = 0, **how):
    """The new tokens of texts that are sampled together. first: the seed of the first text."""
    out, texts = [], []
    for i, row in enumerate(ids, first):
        text, tokens = Text(ByteTokenizer(), [*map(int, row)], n, f"{i}", False, stop), []
        text.add = lambda token, add=text.add, tokens=tokens: tokens.append(token) or add(token)
        texts, out = [*texts, text], [*out, tokens]
    for _ in sample(model, texts, context, temperature=temperature, **how):
        pass
    return out


# ---- one choice


def kept(probabilities: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The probability that each token should have."""
    heat = [p ** (1 / temperature) for p in probabilities]
    order = sorted(range(len(heat)), key=lambda i: -heat[i])[: top_k or None]
    total, reached, keep = sum(heat[i] for i in order), 0.0, []
    for i in order:
        if reached < top_p:
            keep.append(i)
        reached += heat[i] / total
    total = sum(heat[i] for i in keep)
    return [heat[i] / total if i in keep else 0.0 for i in range(len(heat))]


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (1, 0, 1), (0.5, 0, 1), (2, 0, 1), (1, 1, 1), (1, 3, 1), (1, 9, 1), (1, 0, 0.3), (1, 0, 0.7), (1, 0, 0.95),
    (1, 3, 0.8), (2, 0, 0.7), (0.5, 2, 0.8), (1, 0, 1e-6),
])  # fmt: skip
def test_choices_have_the_right_probabilities(temperature, top_k, top_p):
    """Frequencies within five standard deviations; tokens that are cut off never come; rows are independent."""
    draws = 20_000
    logits = torch.tensor(PROBABILITIES).log().repeat(draws, 1) + 3.0
    random = Random(0)
    ids = choose_token(logits, [random.random() for _ in logits], temperature, top_k, top_p)
    ids = torch.tensor(ids).view(draws, len(PROBABILITIES))
    for row, probabilities in enumerate(PROBABILITIES):
        frequencies = torch.bincount(ids[:, row], minlength=5) / draws
        for found, p in zip(frequencies.tolist(), kept(probabilities, temperature, top_k, top_p), strict=True):
            assert abs(found - p) <= 5 * math.sqrt(p * (1 - p) / draws)


# ---- sequences


@pytest.mark.parametrize("name", [
    "gpt2", "llama3", "llama3.1", "mixtral", "qwen2.5", "qwen3", "wide-heads", "mistral 0.1", "qwen2 windows", "olmo3",
    "qwen3_moe windows", "smollm3 windows", "phi3", "gemma3", "granite", "arcee",
    "ministral3",
])  # fmt: skip
def test_greedy_is_transformers_generate(name):
    """Past rope scaling's original context, and past the window."""
    ours, theirs = make_pair(name)
    prompts = random_tokens(4, 41)
    how = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    whole = theirs.generate(prompts, max_new_tokens=18, **how)[:, 41:]
    assert run(ours, prompts, 18) == whole.tolist()
    assert len(whole.unique()) > 10  # not always the same token


@pytest.mark.parametrize("name", ["gpt2", "llama3.1", "mistral 0.1", "olmo3", "qwen3_moe windows", "ministral3"])
def test_texts_of_different_lengths_share_a_batch(name):
    """Each is as if it were alone, past the window, and after others have ended. Greedy text is also transformers'."""
    ours, theirs = make_pair(name)
    prompts, lengths = [random_tokens(1, n)[0] for n in (9, 41, 2, 41, 26)], set()
    stop = [run(ours, prompts[1:2], 9)[0][-1]]
    for how in ({"stop": stop}, {"stop": stop, "temperature": 0.9, "top_p": 0.9}):
        new = run(ours, prompts, 24, **how)
        assert new == [run(ours, [prompt], 24, first=i, **how)[0] for i, prompt in enumerate(prompts)]
        lengths |= {*map(len, new)}
    assert len(lengths) > 2
    for prompt, tokens in zip(prompts, run(ours, prompts, 24, stop=stop), strict=True):
        prompt = prompt[None]
        how = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": stop, "do_sample": False}
        assert tokens == theirs.generate(prompt, max_new_tokens=24, **how)[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("name, length, context", [
    ("llama3", 5, 12), ("gpt2", 5, 13), ("llama3", 30, 12), ("mistral 0.1", 30, 40),
])  # fmt: skip
def test_a_text_longer_than_the_training_rows_goes_on_with_its_newer_half(caplog, name, length, context):
    """As if the text began there. A message says so once."""
    model, ids = make_model(name), random_tokens(2, length)
    warn_once.cache_clear()
    new, text, begin = [run(model, [row], 40, context=context)[0] for row in ids], ids, 0
    for _ in range(40):
        if text.shape[1] - begin > context:
            begin = text.shape[1] - context // 2
        text = torch.cat((text, model.logits(text[:, begin:])[:, -1:].argmax(-1)), 1)
    assert new == text[:, length:].tolist()
    assert [f"the last {context // 2} to {context}" in record.message for record in caplog.records] == [True]


def test_sampled_text_follows_the_logits():
    """The same random numbers and the forward without a cache choose the same tokens. Another seed gives another text,
    and the global generators, which data and training may use, are not touched."""
    model, ids = make_model("llama3"), random_tokens(2, 5)
    state, python = torch.get_rng_state(), getstate()
    how = {"temperature": 0.9, "top_k": 20, "top_p": 0.8}
    new, randoms = run(model, ids, 30, **how), [Random("0"), Random("1")]
    for _ in range(30):
        token = choose_token(model.logits(ids)[:, -1], [random.random() for random in randoms], **how)
        ids = torch.cat((ids, torch.tensor(token)[:, None]), 1)
    assert new == ids[:, 5:].tolist() and new[0] != run(model, ids[:1, :5], 30, first=7, **how)[0]
    assert torch.equal(torch.get_rng_state(), state) and getstate() == python


# ---- folders


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>{{ '\\n\\n' }}"
)
PROMPTS = ["The function returns", "A naïve 日本語 list", "x"]
STOP = {"gpt2": [0], "llama3": [1, 4], "mixtral": [2]}  # end of text, and of a turn
VOCAB = 1500
GREEDY = ["--temperature", "0", "--tokens", "16"]


def save_tokenizer(name: str, folder: Path):
    """Saves a tokenizer of the family's kind -> encode, which adds BOS as the family does; decode, without control
    tokens."""
    if name == "mixtral":
        (folder / "tokenizer.model").write_bytes(_model("llama2"))
        processor = sentencepiece.SentencePieceProcessor(model_proto=_model("llama2"))
        return lambda text: [1, *processor.encode(text)], processor.decode
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>" if name == "llama3" else "<|begin_of_text|>"
    bpe = tokenizers.Tokenizer.from_str(json.dumps(_json(name)))
    if name == "llama3":
        bpe.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )
    theirs.chat_template = TEMPLATE if name == "llama3" else None
    theirs.save_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    return lambda text: theirs(text)["input_ids"], lambda ids: theirs.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """hub(name) -> a folder as transformers writes it, its model, and how its text is encoded and decoded."""

    @cache
    def make(name: str):
        folder = tmp_path_factory.mktemp(name)
        model = make_reference(replace(FAMILY[name], vocab_size=1000 if name == "mixtral" else VOCAB, max_seq_len=512))
        model.save_pretrained(folder)
        return folder, model, *save_tokenizer(name, folder)

    return make


def their_ids(model, ids: list[int], stop: list[int]) -> list[int]:
    """All ids, including the prompt."""
    ids = torch.tensor([ids])
    how = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": stop, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0].tolist()


def say(capsys, *words) -> str:
    capsys.readouterr()
    main([*map(str, words)])
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["gpt2", "llama3", "mixtral"])
def test_the_text_of_a_folder_is_transformers(hub, capsys, name):
    """One prompt, several at once, and none, which begins with BOS."""
    folder, theirs, encode, decode = hub(name)
    expected = [decode(their_ids(theirs, encode(prompt), STOP[name])) for prompt in PROMPTS]
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert text.startswith(prompt)
        assert say(capsys, "--run", folder, "--prompt", prompt, *GREEDY) == text + "\n"
    several = say(capsys, "--run", folder, "--prompt", *PROMPTS, *GREEDY)
    assert several == "".join(f"--- text {i} of 3\n{text}\n" for i, text in enumerate(expected, 1))
    _, first, second = say(capsys, "--run", folder, "--prompt", "x", "x", "--tokens", "24").split("--- text")
    assert first.partition("\n")[2] != second.partition("\n")[2]  # each text has its own seed
    bos = 1 if name == "mixtral" else 0
    assert say(capsys, "--run", folder, *GREEDY) == decode(their_ids(theirs, [bos], STOP[name])) + "\n"


def type_lines(monkeypatch, *lines) -> None:
    """What a user types: lines, errors, and then the end of the input."""
    monkeypatch.setattr("builtins.input", Mock(side_effect=[*lines, EOFError]))


@cache
def answers(hub, questions: tuple[str, ...], system: str | None, first: int = 16) -> list[str]:
    """The answers of transformers, greedy, each to the whole conversation. first: tokens of the first answer."""
    folder, theirs, _, decode = hub("llama3")
    template = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template
    messages, texts = [] if system is None else [{"role": "system", "content": system}], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = template(messages, return_dict=False)
        ids = their_ids(theirs, prompt, STOP["llama3"])[len(prompt) :][: None if texts else first]
        texts.append(decode(ids).rstrip("\ufffd" * (first < 16)))  # half a character is not shown
        messages.append({"role": "assistant", "content": texts[-1]})
    assert all(texts)
    return texts


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_conversation(hub, capsys, monkeypatch, system, typed):
    """Each answer is to the whole conversation. Empty lines change nothing."""
    words = ["--run", hub("llama3")[0], "--chat", *GREEDY] + ["--system", system] * (system is not None)
    questions = "One", "Two", "Three"
    expected = answers(hub, questions, system)
    if typed:
        type_lines(monkeypatch, "One", " ", "Two", "Three")
    else:
        words += ["--prompt", *questions]
        assert say(capsys, *words[:-2]) == expected[0] + "\n"
        expected = [f"> {question}{answer}" for question, answer in zip(questions, expected, strict=True)]
    assert say(capsys, *words).replace("\n", "") == "".join(expected).replace("\n", "")


def test_ctrl_c_stops_an_answer(hub, capsys, monkeypatch):
    """The next message continues after the text that was shown. An answer to --prompt ends the program."""
    forward, calls, texts = Transformer.logits, itertools.count(1), answers(hub, ("One", "Two"), None, first=5)

    def logits(*args, **how):
        if next(calls) == 6:
            raise KeyboardInterrupt
        return forward(*args, **how)

    monkeypatch.setattr(Transformer, "logits", logits)
    type_lines(monkeypatch, "One", "Two")
    words = ["--run", hub("llama3")[0], "--chat", *GREEDY]
    assert say(capsys, *words).replace("\n", "") == "".join(texts).replace("\n", "")
    calls = itertools.count(1)
    with pytest.raises(KeyboardInterrupt):
        say(capsys, *words, "--prompt", "One", "Two")


@pytest.mark.parametrize("words, output", [([], "A list of words"), (["--chat"], "list of words")])
def test_a_text_goes_on_with_a_space_and_an_answer_begins_without(hub, capsys, monkeypatch, words, output):
    """Sentencepiece writes the space before a word in its token, and shows none before the first of a text."""
    folder, _, encode, _ = hub("mixtral")
    ids = encode("list of words")[1:]
    tokens = iter(ids)
    monkeypatch.setattr("generate.choose_token", lambda *_, **__: [next(tokens)])
    assert say(capsys, "--run", folder, "--prompt", "A", "--tokens", len(ids), *words) == output + "\n"


def test_a_folder_says_where_its_texts_end(hub, tmp_path):
    """generation_config.json, else config.json, as for transformers; and an export says it again. A model that was
    trained on text also ends where the next document would begin: with BOS."""
    folder = hub("llama3")[0]
    for file, ends, ids in (("config.json", [5, 7], [5, 7]), ("generation_config.json", 6, [6])):
        folder = shutil.copytree(folder, tmp_path / f"for {file}")
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / file).write_text(json.dumps(read_json(folder / file) | {"eos_token_id": ends}))
        source = open_source(str(folder), None)
        assert source.stop == ids
        export_model(load_model(folder), tmp_path / file, tokenizer=source.tokenizer)
        written = [read_json(tmp_path / file / name) for name in ("config.json", "generation_config.json")]
        assert written[0]["eos_token_id"] == ends and open_source(str(tmp_path / file), None).stop == [*ids, 0]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / file)
        assert theirs.generation_config.eos_token_id == written[1]["eos_token_id"] == [*ids, 0]
        theirs.lm_head.weight.data[0] = 1e3 * theirs.model(torch.tensor([[3, 4]]))[0][0, -1]  # the next token is BOS
        assert theirs.generate(torch.tensor([[3, 4]]), max_new_tokens=9).tolist() == [[3, 4, 0]]


@pytest.mark.parametrize("stored, flag, dtype", [
    ("bfloat16", "auto", torch.bfloat16), ("float16", "auto", torch.float32), ("float32", "bf16", torch.bfloat16),
])  # fmt: skip
def test_dtypes(tmp_path, monkeypatch, stored, flag, dtype):
    """Of parameters and computation."""
    make_reference(FAMILY["llama3"]).to(getattr(torch, stored)).save_pretrained(tmp_path)
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 97)
    model = open_source(str(tmp_path), "bytes").load(flag, ALONE)
    assert {model.dtype, *(p.dtype for p in model.parameters())} == {dtype}


# ---- run folders


def save_run(run: Path, *flags) -> Transformer:
    """Writes the folder of a run after one step, which learned nothing -> its model."""
    config = settled_args([*map(str, flags), "--out", str(run), "--dtype", "fp32"])
    model = scramble(Transformer(config.model_config))
    config = replace(config, batch_tokens=2048)
    save(run, 1, model, make_optimizer(model, config), {}, config)
    return model


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-llama", "tiny-mixtral"])
def test_the_text_of_a_run_is_that_of_its_export(tmp_path, capsys, name):
    model = save_run(tmp_path / "run", "--model", name)
    export_model(model, tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = [their_ids(theirs, [256, *prompt.encode()], [256, 257]) for prompt in PROMPTS]
    expected = [bytes(i for i in row if i < 256).decode(errors="replace") for row in ids]
    found = say(capsys, "--run", tmp_path / "run", "--prompt", *PROMPTS, *GREEDY)
    assert found == "".join(f"--- text {i} of 3\n{text}\n" for i, text in enumerate(expected, 1))


@pytest.mark.parametrize("flags, length, exported", [
    (["--model", "tiny-llama", "--seq_len", 32], 32, 32), (["--model", "tiny-gpt2", "--seq_len", 32], 32, 256),
    (["--weights", "{hf}", "--seq_len", 64], 512, 512), (["--weights", "{hf}", "--seq_len", 1024], 1024, 1024),
])  # fmt: skip
def test_the_trained_length_limits_the_window(tmp_path, hub, flags, length, exported):
    """The length of the rows, or of --weights. GPT-2's config.json has the size of its table of positions."""
    folder = hub("llama3")[0]
    if "--weights" in flags:
        flags = [*flags, "--model", folder, "--tokenizer", folder]
    save_run(tmp_path / "run", *(str(flag).format(hf=folder) for flag in flags))
    assert open_source(str(tmp_path / "run"), None).context == length
    export_trained(checkpoint.newest(tmp_path / "run"), tmp_path / "hf", torch.float32)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "hf").max_position_embeddings == exported
    assert open_source(str(tmp_path / "hf"), "bytes").context == exported


def test_a_run_on_token_shards_needs_a_tokenizer(tmp_path, hub, capsys):
    folder, _, encode, decode = hub("gpt2")
    write_shard(tmp_path / "tokens.bin", random_tokens(5000).numpy(), VOCAB)
    flags = ["--data", tmp_path / "tokens.bin", "--model", "tiny-llama", "--vocab_size", VOCAB]
    model = save_run(tmp_path / "run", *flags)
    with pytest.raises(UserError, match="trained on token shards: name the --tokenizer"):
        main(["--run", str(tmp_path / "run")])
    ids = torch.tensor([[0, *encode("A list")]])
    expected = decode([*ids[0].tolist(), *run(model, ids, 16)[0]])
    words = ["--run", tmp_path / "run", "--tokenizer", folder, "--prompt", "A list", *GREEDY]
    assert say(capsys, *words) == expected + "\n"


# ---- mistakes


@pytest.mark.parametrize("words, message", [
    *((words, f"{words.replace(' ', ': ')} must be ") for words in (
        "--temperature -1", "--temperature nan", "--top_p 0", "--top_p 1.1", "--top_k -1", "--tokens 0",
        f"--seed {2**64}")),
    ("--promt x", "did you mean --prompt"), ("--samples 2", "--samples has no effect without --prompts or"),
    ("--prompts x", "--prompts needs --out"), ("--prompts x --out y --prompt z", "--prompt has no effect with"),
    ("--score x --temperature 0", "--temperature has no effect with --score"), ("--batch 2", "--batch has no effect"),
    ("--run {empty}", "config.json cannot be read"),
    ("--run {llama3} --prompts {rows} --out {new}", "row 2: the prompt is missing or empty"),
    ("--run {llama3} --prompts {rows} --out {empty}", "exists, without answers"),
    ("--run {llama3} --prompts {rows} --out {new} --reward {rules}:x", "expected FILE.py:NAME, .*KeyError.'x'"),
    ("--run {llama3} --prompts {rows} --out {new} --reward x.py:x", "expected FILE.py:NAME, .*FileNotFound"),
    ("--run {llama3} --prompts {rows} --out {new} --reward {rules}:undefined --tokens 1", "gives nan for {'prompt"),
    ("--run {run} --score {none}", "none.jsonl has no rows"),
    ("--prompts x --out y --stop= ", "an empty text"),
    ("--run {llama3} --score {questions} --out /dev/null", "/dev/null exists, or"),
    ("--run {llama3} --score {questions} --out {new}/x", "x exists, or its folder does not"),
    ("--run {run} --tokenizer {llama3}", "the tokenizer has 1500 ids, the model 258"),
])  # fmt: skip
def test_mistakes_are_refused(hub, tmp_path, words, message):
    if "{run}" in words:
        save_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.jsonl").touch()
    (tmp_path / "questions.jsonl").write_text('{"text": "x"}')
    (tmp_path / "rules.py").write_text(REWARD)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n' + '{"text": "x"}\n' * ("row 2" in message))
    names = {name: tmp_path / name for name in ("run", "empty", "new")}
    files = {name: tmp_path / f"{name}.jsonl" for name in ("rows", "none", "questions")}
    files |= {"rules": tmp_path / "rules.py", "llama3": hub("llama3")[0]}
    words = words.format(**names, **files).split()
    with pytest.raises(Message, match=message):
        main(["--run", "nowhere", *words])


# ---- a file of prompts

REWARD = """
def vowels(prompt, answer, row):
    return sum(answer.count(c) for c in "aeiou") + row.get("bonus", 0)

def undefined(prompt, answer, row):
    return float("nan")
"""
ASKED = [
    {"prompt": "The function returns", "id": "first", "answer": 7, "messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": "One"}]},
    {"prompt": "A naïve 日本語 list of many words"},
    {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "One"},
                       {"from": "gpt", "value": "left out"}], "id": 4},
    {"prompt": "x"},
]  # fmt: skip


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def ask(folder: Path, rows: list[dict], *words) -> list[dict]:
    """The lines of answers.jsonl."""
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rules.py").write_text(REWARD)
    main([*map(str, words), "--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "out")])
    return read_lines(folder / "out/answers.jsonl")


def test_answers_to_a_file_are_those_to_single_prompts(hub, tmp_path):
    """Texts and conversations share batches. The oracle is transformers, one prompt at a time."""
    folder, theirs, encode, decode = hub("llama3")
    expected = []
    for row in ASKED:
        if "prompt" in row:
            ids = encode(row["prompt"])
            expected.append(decode(their_ids(theirs, ids, STOP["llama3"])[len(ids) :]))
        else:
            expected += answers(hub, ("One",), "Be brief." if "id" in row else None)
    found = ask(tmp_path, ASKED, "--run", folder, *GREEDY, "--batch", 4)
    assert [row["completion"] for row in found] == expected and "messages" not in found[0]
    assert [(row.get("id"), row.get("answer"), row["sample"]) for row in found] == [
        ("first", 7, 0), (None, None, 0), (None, None, 0), (4, None, 0), (None, None, 0)]  # fmt: skip
    assert found[3]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"}]
    shutil.rmtree(tmp_path / "out")
    cut = expected[2][3:5]
    stopped = ask(tmp_path, ASKED, "--run", folder, *GREEDY, "--stop", cut, "no text")
    assert [row["completion"] for row in stopped] == [text.partition(cut)[0] for text in expected]
    assert stopped[2]["finish"] == "stop" and found[2]["finish"] == "length"


def test_neither_a_kill_nor_other_batches_change_the_answers(tmp_path, monkeypatch):
    """Batches of the killed call are not sampled again. Another seed gives other answers."""
    save_run(tmp_path / "run")
    rows = [{"prompt": "word " * (1 + n % 5) + str(n), "at": datetime(2024, 5, 6)} for n in range(7)]
    monkeypatch.setitem(READERS, ".jsonl", lambda stream: [*rows])  # .parquet has dates
    words = ["--run", tmp_path / "run", "--tokens", 12, "--samples", 3]
    whole = ask(tmp_path, [], *words, "--batch", 21)
    assert {row["at"] for row in whole} == {"2024-05-06 00:00:00"}
    assert [row["sample"] for row in whole] == [0, 1, 2] * 7 and len({row["completion"] for row in whole}) == 21
    shutil.rmtree(tmp_path / "out")
    batches, killed = [], [2]

    def kill(model, texts, *args, **how):
        if len(batches) in killed:
            raise KeyboardInterrupt
        batches.append(len(texts))
        return sample(model, texts, *args, **how)

    monkeypatch.setattr("generate.sample", kill)
    with pytest.raises(KeyboardInterrupt):
        ask(tmp_path, [], *words, "--batch", 5)
    killed.clear()
    assert ask(tmp_path, [], *words, "--batch", 5) == whole
    assert batches == [5, 5, 5, 5, 1]
    with pytest.raises(UserError, match="without answers made with these flags"):
        ask(tmp_path, [], *words, "--batch", 5, "--seed", 1)
    shutil.rmtree(tmp_path / "out")
    assert {row["completion"] for row in ask(tmp_path, [], *words, "--seed", 1)}.isdisjoint(
        row["completion"] for row in whole
    )


@pytest.mark.slow  # two processes
def test_ranks_share_the_prompts(tmp_path):
    save_run(tmp_path / "run")
    words = ["--run", tmp_path / "run", "--tokens", 12, "--samples", 3, "--batch", 4]
    whole = ask(tmp_path, ASKED, *words)
    out = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "two"]
    run_ranks(2, "import generate; generate.main(sys.argv[2:])", *map(str, words + out))
    assert read_lines(tmp_path / "two/answers.jsonl") == whole


def test_rewards_choose_rows_that_training_reads(tmp_path):
    """The oracle picks them from answers.jsonl."""
    save_run(tmp_path / "run")
    rows = [{"messages": [{"role": "user", "content": f"Say {n}"}], "bonus": n} for n in range(30)]
    words = ["--run", tmp_path / "run", "--tokens", 12, "--samples", 4, "--reward", f"{tmp_path}/rules.py:vowels"]
    found = ask(tmp_path, rows, *words)
    groups = [found[i : i + 4] for i in range(0, 120, 4)]
    for n, group in enumerate(groups):
        assert [row["reward"] for row in group] == [n + sum(map(row["completion"].count, "aeiou")) for row in group]
    best, pairs = (read_lines(tmp_path / f"out/{name}.jsonl") for name in ("best", "pairs"))
    assert [row["reward"] for row in best] == [max(row["reward"] for row in group) for group in groups]
    assert all(row in group for row, group in zip(best, groups, strict=True))
    differ = [group for group in groups if len({row["reward"] for row in group}) > 1]
    assert 5 < len(pairs) == len(differ)
    for pair, group in zip(pairs, differ, strict=True):
        rewards = {row["completion"]: row["reward"] for row in group}
        assert rewards[pair["chosen"]] == max(rewards.values()) > rewards[pair["rejected"]] == min(rewards.values())
    flags = ["--model", "tiny-llama", "--tokenizer", "bytes", "--seq_len", "256", "--data"]
    (chats,) = make_loader(settled_args([*flags, str(tmp_path / "out/best.jsonl")])).sources
    (source,) = make_loader(settled_args([*flags, str(tmp_path / "out/pairs.jsonl"), "--dpo", "sigmoid"])).sources
    assert chats.is_chat and source.pair_count == len(pairs) * 19 // 20


def test_a_reward_judges_answers_that_were_sampled_before(tmp_path, monkeypatch):
    """After a mistake in its function, too."""
    save_run(tmp_path / "run")
    words, reward = ["--run", tmp_path / "run", "--tokens", 12], ["--reward", f"{tmp_path}/rules.py:vowels"]
    before = ask(tmp_path, ASKED, *words)
    monkeypatch.setattr("generate.sample", None)
    monkeypatch.setattr("test_generate.REWARD", REWARD.replace('row.get("bonus", 0)', "1 / 0"))
    with pytest.raises(ZeroDivisionError):
        ask(tmp_path, ASKED, *words, *reward)
    monkeypatch.setattr("test_generate.REWARD", "vowels = lambda prompt, answer, row: len(answer)")
    after = ask(tmp_path, ASKED, *words, *reward)
    assert after == [row | {"reward": len(row["completion"])} for row in before]
