"""Oracles: tokenizers, sentencepiece and tiktoken on vocabularies that are trained here; transformers for the byte
tokenizer's files; the families' own chat templates, rendered by jinja2; Python's UTF-8 for bytes."""

import base64
import io
import json
import random
import re
import shutil
import unicodedata
from functools import partial
from pydoc_data.topics import topics

import jinja2
import pytest
import sentencepiece
import tokenizers
import tokenizers.pre_tokenizers as pre

from lib import tokenizer as T
from lib.errors import UserError

TEXT = [text for _, text in sorted(topics.items())][:40]
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")

NAMES = "<s> </s> [INST] <unk> <|endoftext|> <tool> ▁ Ġ <0x0A> 's 'LL 'ſ"
UNICODE = "é e\u0301 日本語 नमस्ते ١٢٣ ½ Ⅳ 1234567 👩\u200d👩\u200d👧 🎈 \u200b \U0010ffff ß İ"


def _strings(n: int, seed: int = 0) -> list[str]:
    """Words, white space, control characters, control tokens' names, Unicode, and mixtures of them."""
    r = random.Random(seed)
    words = " ".join(TEXT[:10]).split(" ")
    odd = ["", "  ", "\r\n", *" \n\t\0\x1c\x7f\x85\xa0\u2003\u2028\u3000\ufeff"]
    odd += [*SPECIAL, *NAMES.split(), *UNICODE.split()]
    out = ["", *odd, *(c * k for c in odd for k in (2, 3, 17))]
    while len(out) < n:
        parts = []
        for _ in range(r.randrange(1, 20)):
            code = r.choice((r.randrange(128), r.randrange(0x3000), r.randrange(0xE000, 0x110000)))
            part = (r.choice(words), " " + r.choice(words), r.choice(odd) * r.choice((1, 2, 5)), chr(code))
            parts.append(r.choice(part))
        out.append("".join(parts))
    return out


STRINGS = _strings(1030)


def _train(kind: str) -> dict:
    """-> a tokenizer.json, as the tokenizers library writes it."""
    level = partial(pre.ByteLevel, add_prefix_space=False)

    def split(expression: str):
        pattern = pre.Split(tokenizers.Regex(expression), "isolated")
        return pre.Sequence([pattern, level(use_regex=False)])

    steps = {
        "qwen": split(QWEN_REGEX),
        "gpt2": level(),
        "gpt2, leading space": pre.ByteLevel(add_prefix_space=True),
        "llama3": split(LLAMA3_REGEX),
        "digits": pre.Sequence([pre.Digits(True), level()]),
        "own split": split(r"[\p{L}\p{M}]+\s?|\p{Nd}{1,2}(?=\p{Nd})|!++"),
        "no split": level(use_regex=False),
    }
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.pre_tokenizer, t.decoder = steps[kind], tokenizers.decoders.ByteLevel()
    t.normalizer = tokenizers.normalizers.NFC() if kind == "qwen" else None
    special = (*SPECIAL[:2], "<|im_start|>", "<|im_end|>") if kind == "qwen" else SPECIAL
    options = {"special_tokens": list(special), "initial_alphabet": pre.ByteLevel.alphabet(), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, **options)
    t.train_from_iterator(TEXT[:12] if kind == "no split" else TEXT, trainer)
    return json.loads(t.to_str())


def _renumber(d: dict) -> dict:
    """The same vocabulary with other ids: the order of the merges is no longer that of the ids."""
    ids = list(range(len(d["model"]["vocab"])))
    random.Random(1).shuffle(ids)
    d["model"]["vocab"] = {t: ids[i] for t, i in d["model"]["vocab"].items()}
    for t in d["added_tokens"]:
        t["id"] = ids[t["id"]]
    return d


def _add_words(d: dict) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for i, word in enumerate(("<tool>", "  ", "<tool><tool>", "日本", "the")):
        d["added_tokens"].append({"id": d["model"]["vocab"].get(word, 1500 + i), "content": word, **flags})
    return d


def _take_whole(d: dict) -> dict:
    """As Llama 3 says it, with tokens that no merge makes."""
    d["model"]["ignore_merges"] = True
    d["model"]["vocab"] |= {"Ġstatementsxyz": 3000, "qqqqq": 3001}
    return d


KINDS = ("gpt2", "gpt2, leading space", "llama3", "digits", "own split", "no split", "qwen")
JSONS = {kind: partial(_train, kind) for kind in KINDS} | {
    "other ids": lambda: _renumber(_train("llama3")),
    "words": lambda: _add_words(_train("gpt2")),
    "words, composed": lambda: _add_words(_train("qwen")),
    "whole pieces": lambda: _take_whole(_train("llama3")),
}
CACHE: dict = {}


def _json(kind: str) -> dict:
    if kind not in CACHE:
        CACHE[kind] = json.dumps(JSONS[kind]())
    return json.loads(CACHE[kind])


def _write(folder, **files):
    """Writes name__ext=content into the folder -> the folder as a spec."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(folder)


def _hf(d: dict) -> tokenizers.Tokenizer:
    t = tokenizers.Tokenizer.from_str(json.dumps(d))
    t.encode_special_tokens = True  # control tokens in a text are text
    return t


def _stream(tokenizer, ids: list[int]) -> str:
    return "".join(map(tokenizer.decoder(), [*ids, None]))


@pytest.mark.parametrize("kind", JSONS)
def test_tokenizer_json_is_exact(kind, tmp_path):
    d = _json(kind)
    ours, oracle = T.load_tokenizer(_write(tmp_path, tokenizer__json=d)), _hf(d)
    r = random.Random(2)
    for text in STRINGS:
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids), text
        some = [r.randrange(ours.vocab_size) for _ in range(9)]
        some = [i for i in some if i in ours.bytes or i in ours.control.values()]  # the others have no meaning
        assert ours.decode(some) == oracle.decode(some) == _stream(ours, some)
    assert ours.vocab_size == 1 + max([*d["model"]["vocab"].values(), *(t["id"] for t in d["added_tokens"])])
    assert ours.control == {t["content"]: t["id"] for t in d["added_tokens"] if t["special"]}
    assert (ours.ids is None) == (kind != "other ids")


def test_any_list_of_merges_is_exact():
    """Lists that no training makes: a token in several ways, merges that come before their parts, dead tokens."""
    base, seen = _json("gpt2"), 0
    for seed in range(150):
        r = random.Random(seed)
        vocab, merges, parts = {c: i for i, c in enumerate(T.BYTE_OF)}, [], list("abc")
        ids = r.sample(range(256, 400), 144) if seed % 2 else list(range(256, 400))
        for _ in range(r.randrange(3, 30)):
            a, b = r.choice(parts), r.choice(parts)
            if len(a + b) <= 8:
                merges.append(f"{a} {b}")
                if a + b not in vocab:
                    vocab[a + b] = ids.pop(0)
                    parts.append(a + b)
        r.shuffle(merges)
        dead = "".join(r.choice("abc") for _ in range(6))
        vocab.setdefault(dead, 401)
        base["added_tokens"] = []
        base["model"] |= {"vocab": vocab, "merges": merges, "ignore_merges": seed % 3 == 0}
        try:
            ours = T._from_json(base, T.Beside({}, {}, {}))
        except UserError as e:
            assert seed % 3 == 0 and "no merge joins" in str(e)
            continue
        seen += 1
        oracle = _hf(base)
        for text in ("".join(r.choice("abc") for _ in range(r.randrange(1, 16))) for _ in range(60)):
            assert ours.encode(text) == oracle.encode(text).ids, (seed, text)
    assert seen > 100


def test_long_white_space_is_exact(tmp_path):
    """tiktoken's own way ends in a stack overflow at a million."""
    for kind in ("llama3", "gpt2"):
        d = _json(kind)
        (tmp_path / kind).mkdir()
        ours, oracle = T.load_tokenizer(_write(tmp_path / kind, tokenizer__json=d)), _hf(d)
        long = ("\n" * 99_999 + "1", "\t" * 10**6, "a" * 10**6) if kind == "llama3" else ()
        for text in (" " * 120_001 + "x", "a" * 1000 + " \n" * 60_000, *long):
            ids = ours.encode(text)
            assert ours.decode(ids) == text
            assert len(text) > 200_000 or ids == oracle.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", ["gpt2", "qwen"])
def test_vocab_and_merges(kind, tmp_path):
    d = _json(kind)
    merges = "#version: 0.2\n" + "\n".join(" ".join(m) for m in d["model"]["merges"]) + "\n"
    d["model"]["vocab"] |= {"<|endoftext|>": 1500, "model": 1501}  # GPT-2's own vocabulary has that word too
    folder = _write(tmp_path, vocab__json=d["model"]["vocab"], merges__txt=merges.encode())
    if kind == "qwen":
        _write(tmp_path, tokenizer_config__json={"tokenizer_class": "Qwen2Tokenizer"})
    oracle = _hf(d)
    for spec in (folder, f"{folder}/vocab.json"):
        ours = T.load_tokenizer(spec)
        assert all(ours.encode(s) == oracle.encode(s, add_special_tokens=False).ids for s in STRINGS)
        assert (ours.bos_id, ours.eos_id, ours.vocab_size, ours.stop_ids) == (1500, 1500, 1502, {1500})
        assert set(ours.files.values()) - {"tokenizer_config.json"} == {"merges.txt", "vocab.json"}


def test_llama3_ranks(tmp_path):
    """Its tokenizer.model against tokenizers on the same vocabulary."""
    d = _json("llama3")
    first = len(SPECIAL)  # of the ids that are no control tokens
    ranks = {bytes(T.BYTE_OF[c] for c in t): i - first for t, i in d["model"]["vocab"].items() if t not in SPECIAL}
    lines = [base64.b64encode(t) + f" {i}\n".encode() for t, i in ranks.items()]
    ours, oracle = T.load_tokenizer(_write(tmp_path, tokenizer__model=b"".join(lines))), _hf(d)
    for s in STRINGS:
        assert [i + first for i in ours.encode(s)] == oracle.encode(s, add_special_tokens=False).ids
    n = len(ranks)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (n, n + 1, n + 256)
    assert ours.stop_ids == {n, n + 1, n + 8, n + 9} and ours.control["<|eot_id|>"] == n + 9
    assert len(ours.control) == 256 and T.chat_family(ours) == "llama3"


# ---- sentencepiece

LLAMA2 = {
    "model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
}  # fmt: skip
MODELS = {
    "llama2": {},
    "no leading space": {"add_dummy_prefix": False},
    "no byte fallback": {"byte_fallback": False},
    "own symbols": {"user_defined_symbols": ["<tool>", "\n"], "control_symbols": ["[INST]", "[/INST]"]},
    "newlines": {"user_defined_symbols": ["\n\n"]},
    "control": {"control_symbols": ["[INST]", "[/INST]"]},
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}


def _model(kind: str) -> bytes:
    if kind not in CACHE:
        out = io.BytesIO()
        sentences = iter("\n".join(TEXT).split("\n"))
        options = {**LLAMA2, **MODELS[kind], "vocab_size": 1000, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=out, **options)
        CACHE[kind] = out.getvalue()
    return CACHE[kind]


@pytest.mark.parametrize("kind", MODELS)
def test_tokenizer_model_is_exact(kind, tmp_path, monkeypatch):
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__model=_model(kind)))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=_model(kind))
    r = random.Random(3)
    for text in STRINGS:
        ids = oracle.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids) == _stream(ours, ids), text
        some = [r.randrange(r.choice((280, 1000))) for _ in range(12)]  # many bytes that are no UTF-8
        assert ours.decode(some) == _stream(ours, some)
    whole = "\n".join(STRINGS)
    assert ours.encode(whole) == oracle.encode(whole)
    monkeypatch.setattr(ours, "PIECE", 7)  # cuts everywhere it may
    assert ours.encode(whole) == oracle.encode(whole)
    assert all(ours.encode(text) == oracle.encode(text) for text in STRINGS + TEXT[:5])
    assert (ours.bos_id, ours.eos_id, ours.vocab_size, ours.stop_ids) == (1, 2, 1000, {1, 2})
    assert ours.decode([-1, 1, *oracle.encode("a word"), 2, 1000, 99999]) == "a word"
    assert (ours.inner is not None) == (kind in ("llama2", "own symbols", "control"))


@pytest.mark.parametrize("kind", ["bytes", "llama3", "words", "other ids", "llama2", "no leading space"])
def test_sizes_of_tokens_add_up_to_the_bytes_of_the_text(kind, tmp_path):
    files = {"tokenizer__json": _json(kind)} if kind in JSONS else {}
    files = {"tokenizer__model": _model(kind)} if kind in MODELS else files
    ours = T.load_tokenizer(_write(tmp_path, **files) if files else kind)
    sizes = T.token_sizes(ours)
    for text in filter(None, STRINGS):
        if "\u2581" not in text:  # sentencepiece's own sign for a space
            leading = kind == "llama2"  # it adds a space
            assert sum(sizes[i] for i in ours.encode(text)) == len(text.encode()) + leading, text
    assert len(sizes) == ours.vocab_size and not any(sizes[i] for i in ours.control.values())


# ---- bytes


@pytest.fixture
def bytes_tokenizer():
    return T.load_tokenizer("bytes")


def test_bytes(bytes_tokenizer):
    for text in STRINGS:
        ids = bytes_tokenizer.encode(text)
        assert ids == list(bytes(text, "utf-8")) and all(type(i) is int for i in ids)
        assert bytes_tokenizer.decode(ids) == text == _stream(bytes_tokenizer, ids)
    for i in range(256):
        assert bytes_tokenizer.decode([i]) == (chr(i) if i < 128 else "\ufffd")
    assert bytes_tokenizer.decode([256, 72, 257, 105, 300, -1]) == "Hi"
    assert (bytes_tokenizer.bos_id, bytes_tokenizer.eos_id, bytes_tokenizer.vocab_size) == (256, 257, 258)


def test_bytes_as_files(tmp_path, bytes_tokenizer):
    from transformers import AutoTokenizer

    T.write_byte_tokenizer(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    again = T.load_tokenizer(str(tmp_path))
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in STRINGS:
        ids = bytes_tokenizer.encode(text)
        assert again.encode(text) == ids
        if "s>" not in text:  # there, transformers sees control tokens
            assert theirs(text, add_special_tokens=False)["input_ids"] == ids
            assert theirs(text)["input_ids"] == [256, *ids] == library.encode(text).ids
        assert theirs.decode(ids) == again.decode(ids) == text
    assert theirs("a</s>")["input_ids"] == [256, 97, 257]
    for t in (theirs.bos_token_id, theirs.eos_token_id, len(theirs)), (again.bos_id, again.eos_id, again.vocab_size):
        assert t == (256, 257, 258)


# ---- what a tokenizer's folder says


@pytest.mark.parametrize(
    "files, bos, eos, stops",
    [
        ({}, 0, 1, {0, 1, 4}),
        ({"tokenizer_config__json": {"bos_token": None, "eos_token": "<|eot_id|>"}}, 0, 4, {0, 1, 4}),
        ({"special_tokens_map__json": {"eos_token": {"content": "<|eot_id|>"}}}, 0, 4, {0, 1, 4}),
        ({"generation_config__json": {"eos_token_id": [1, 9]}, "config__json": {"eos_token_id": 8}}, 0, 1,
         {0, 1, 4, 9}),
    ],
)  # fmt: skip
def test_ends(files, bos, eos, stops, tmp_path):
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=_json("llama3"), **files))
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (bos, eos, stops)


def test_one_control_token_is_both_ends(tmp_path):
    d = json.loads(json.dumps(_json("gpt2")).replace("<|begin_of_text|>", "<|endoftext|>"))
    d["added_tokens"] = d["added_tokens"][:1]
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=d))
    assert (ours.bos_id, ours.eos_id) == (0, 0)


def test_tokens_beyond_the_model(tmp_path):
    """Fine-tunes of Llama 2 add control tokens behind the model's."""
    files = {"added_tokens__json": {"<pad>": 1000}, "tokenizer_config__json": {"added_tokens_decoder": {}}}
    files["tokenizer_config__json"]["added_tokens_decoder"]["1001"] = {"content": "<|im_end|>", "special": True}
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__model=_model("llama2"), **files))
    assert ours.vocab_size == 1002 and ours.control["<|im_end|>"] == 1001
    assert max(ours.encode("<pad><|im_end|>")) < 1000 and ours.decode([1000, 1001]) == ""


def test_the_model_of_llama2_is_taken_before_its_json(tmp_path):
    d = _json("gpt2") | {"pre_tokenizer": None, "normalizer": {"type": "Prepend", "prepend": "▁"}}
    files = {"tokenizer__model": _model("llama2"), "config__json": {"model_type": "mixtral"}}
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=d, **files))
    assert isinstance(ours, T.SentencePiece) and ours.model_type == "mixtral"
    assert sorted(ours.files.values()) == ["tokenizer.json", "tokenizer.model"]


def test_a_file_of_another_name_is_exported_under_its_own(tmp_path):
    """And the other tokenizer beside it is not."""
    _write(tmp_path, tokenizer__json=_json("gpt2"), tokenizer__model=_model("llama2"))
    for old, new in (("tokenizer.model", "mine.model"), ("tokenizer.json", "mine.json")):
        shutil.copy(tmp_path / old, tmp_path / new)
        assert T.load_tokenizer(str(tmp_path / new)).files == {tmp_path / new: old}


def test_a_chat_template_of_another_kind_is_refused(tmp_path):
    config = {"chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}", "bos_token": "<s>"}
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__model=_model("llama2"), tokenizer_config__json=config))
    with pytest.raises(UserError, match="none of Llama's or Mixtral's.*im_start"):
        T.chat_family(ours, "llama")


def test_fingerprint(tmp_path):
    seen = {T.ByteTokenizer.fingerprint}
    gpt2, llama3 = ({"tokenizer__json": _json(kind)} for kind in ("gpt2", "llama3"))
    other_bos = gpt2 | {"tokenizer_config__json": {"bos_token": "<|eot_id|>"}}
    for i, files in enumerate([gpt2, llama3, other_bos, {"tokenizer__model": _model("llama2")}]):
        prints = []
        for copy in "ab":
            (tmp_path / f"{i}{copy}").mkdir()
            prints.append(T.load_tokenizer(_write(tmp_path / f"{i}{copy}", **files)).fingerprint)
        assert prints[0] == prints[1] and len(prints[0]) == 16
        seen.add(prints[0])
    assert len(seen) == 5


def test_half_a_surrogate_pair_is_refused(tmp_path):
    for i, files in enumerate([{"tokenizer__json": _json("gpt2")}, {"tokenizer__model": _model("llama2")}, None]):
        (tmp_path / str(i)).mkdir()
        ours = T.load_tokenizer(_write(tmp_path / str(i), **files) if files else "bytes")
        with pytest.raises(UserError, match="surrogate"):
            ours.encode("a\ud800b")


def _model_json(**changes) -> dict:
    d = _json("gpt2")
    return d | {"model": d["model"] | changes}


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "no tokenizer.json or tokenizer.model or vocab.json in it; it holds nothing"),
        ({"weights__bin": b"x"}, "it holds weights.bin"),
        ({"tokenizer__json": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"}, "LFS pointer"),
        ({"tokenizer__model": b"<!DOCTYPE html><html>"}, "HTML or XML page"),
        ({"tokenizer__json": b'{"model": '}, "not JSON"),
        ({"tokenizer__json": b'{"a":' * 100_000}, "not JSON"),
        ({"tokenizer__json": b"[1, 2]"}, "damaged"),
        ({"tokenizer__json": {"model": {"vocab": 3}, "pre_tokenizer": {"type": "ByteLevel"}}}, "damaged"),
        ({"tokenizer__model": b"\x80\x02}q\x00."}, "a pickle, which can run code"),
        ({"tokenizer__model": b""}, "damaged"),
        ({"tokenizer__model": b"IQ== 0\nIg== x\n"}, "damaged"),
        ({"tokenizer__model": b"IQ== 0\nIg== 0\n"}, "its ranks are not 0, 1, 2"),
        ({"tokenizer__model": b"IQ== 0\nIg== 1\n"}, "no token for 254 of the 256 bytes"),
        ({"vocab__json": {"a": 0}}, "merges.txt"),
        ({"tokenizer__json": _model_json(type="WordPiece")}, "model is WordPiece"),
        ({"tokenizer__json": lambda: _json("gpt2") | {"pre_tokenizer": {"type": "Metaspace"}}}, "give tokenizer.mo"),
        ({"tokenizer__json": lambda: _json("gpt2") | {"normalizer": {"type": "NFKC"}}}, 'normalizer {"type": "NFKC"}'),
        ({"tokenizer__json": _model_json(dropout=0.1)}, "dropout 0.1"),
        ({"tokenizer__json": _model_json(byte_fallback=True)}, "byte_fallback true"),
        ({"tokenizer__json": _model_json(continuing_subword_prefix="##")}, "continuing_subword_prefix"),
        ({"tokenizer__json": _model_json(merges=["a zzzz"])}, "is not in the vocabulary"),
        ({"tokenizer__json": _model_json(vocab={"a": 0, "b": 0})}, "not distinct"),
        ({"tokenizer__json": _model_json(vocab={"a": "0"})}, "not distinct whole numbers"),
        ({"tokenizer__json": _model_json(vocab={"日": 7000})}, "byte alphabet"),
        ({"tokenizer__json": _json("gpt2"), "tokenizer_config__json": {"bos_token": "<nope>"}}, "bos_token '<nope>'"),
        ({"tokenizer__json": _json("gpt2") | {"added_tokens": []}}, "name bos_token and eos_token"),
    ],
)
def test_refusals(files, message, tmp_path):
    files = {k: v() if callable(v) else v for k, v in files.items()}
    with pytest.raises(UserError, match="--tokenizer|is not JSON|HTML|LFS|pickle|merges.txt") as error:
        T.load_tokenizer(_write(tmp_path, **files))
    assert message in str(error.value) and str(tmp_path) in str(error.value)


LEVEL = {"type": "ByteLevel", "add_prefix_space": False}


@pytest.mark.parametrize("steps", [
    [{"type": "Whitespace"}, LEVEL],
    [{"type": "Digits", "individual_digits": False}, LEVEL],
    [{"type": "Digits", "individual_digits": True}, LEVEL | {"add_prefix_space": True}],
    *([{"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False}, LEVEL | {"use_regex": False}]
      for pattern, behavior in (({"Regex": "a+"}, "Removed"), ({"Regex": r"\w+"}, "Isolated"),
                                ({"String": "a"}, "Isolated"))),
])  # fmt: skip
def test_other_splits_are_refused(steps, tmp_path):
    d = _json("gpt2") | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    with pytest.raises(UserError, match="pre_tokenizer .* is not supported"):
        T.load_tokenizer(_write(tmp_path, tokenizer__json=d))


def _split(expression: str) -> dict:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    steps = [split, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]
    return _json("gpt2") | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}


@pytest.mark.parametrize("expression", [
    "^a|b", "a$", "(?i:ß)", "(?i)a", "(?i:ss)|a", "(?m:.)+", "(?x: a)", "(?#c)a", "(?~a)", r"\w+", r"\<a", r"\Aa",
    "[a[bc]]", "[a&&b]", "[a--b]", "[[:alpha:]]", "a{2}+", "a{,2}", "a{2}{3}", "a+{2}", r"(?<n>a)\k<n>", r"(a)\1",
    r"\p{N}*", "a|", "()", "(?=a)", "a?", "a*+|b", "(a|b?)(?!c)", "[ab]{0}", "[ab]{0,3}",
])  # fmt: skip
def test_expressions_that_the_library_reads_otherwise_are_refused(expression, tmp_path):
    with pytest.raises(UserError, match="pre_tokenizer Split .* is not supported: ") as error:
        T.load_tokenizer(_write(tmp_path, tokenizer__json=_split(expression)))
    assert repr(expression) in str(error.value)


CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)", "(?i:[sdmt]|ll|ve|re)"


@pytest.mark.parametrize("expression", [
    rf"'{CASELESS[1]}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    rf" ?[\p{{Lu}}\p{{M}}]*[\p{{Ll}}\p{{M}}]+{CASELESS[0]}?| ?[^\s\p{{L}}]+[\r\n/]*|\s+(?!\S)",
    r"(a|\p{L})(?=(\p{N}|\.))|[\]()^$-]{2,}\(", r"(?<= )\p{L}+(?<!s)|[^ -~](?>é|e)?", r"\p{N}",
])  # fmt: skip
def test_own_expressions_cut_as_the_library_does(expression, tmp_path, monkeypatch):
    """Also with Python's expressions, which long white space and long texts without a match need; these know newer
    letters."""
    d = _split(expression)
    ours, oracle = T.load_tokenizer(_write(tmp_path, tokenizer__json=d)), _hf(d)
    expected = {text: oracle.encode(text, add_special_tokens=False).ids for text in STRINGS}
    assert {text: ours.encode(text) for text in STRINGS} == expected
    monkeypatch.setattr(T, "SPACES", 1)
    known = [text for text in STRINGS if all(unicodedata.category(c) != "Cn" for c in text)]
    assert len(known) > 100 and all(ours.encode(text) == expected[text] for text in known)
    if expression == r"\p{N}":
        assert ours.decode(ours.encode("ab" * 500_000)) == "ab" * 500_000


@pytest.mark.parametrize("decoder", [
    None, {"type": "Fuse"}, {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
])  # fmt: skip
def test_other_decoders_are_refused(decoder, tmp_path):
    with pytest.raises(UserError, match="decoder {.* is not supported, expected Byte"):
        T.load_tokenizer(_write(tmp_path, tokenizer__json=_json("gpt2") | {"decoder": decoder}))
    T.load_tokenizer(_write(tmp_path, tokenizer__json=_json("gpt2")))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_words_that_change_their_surroundings_are_refused(flag, tmp_path):
    d = _json("words")
    d["added_tokens"][-1][flag] = True
    with pytest.raises(UserError, match="not supported"):
        T.load_tokenizer(_write(tmp_path, tokenizer__json=d))


def test_normalized_words_are_refused_with_a_normalizer(tmp_path):
    d = _json("words, composed")
    d["added_tokens"] = [t | {"normalized": not t["special"]} for t in d["added_tokens"]]
    with pytest.raises(UserError, match="with the normalizer NFC"):
        T.load_tokenizer(_write(tmp_path, tokenizer__json=d))


@pytest.mark.parametrize("spec", ["", "Bytes", "no/such/tokenizer.model"])
def test_an_unknown_tokenizer_is_refused(spec, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="--tokenizer") as error:
        T.load_tokenizer(spec)
    assert spec in str(error.value) and "bytes" in str(error.value)
    with pytest.raises(UserError, match="/dev/zero cannot be read: it is no file"):
        T.load_tokenizer("/dev/zero")


# ---- chat

TEMPLATES = {
    "llama2": r"""{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message =
messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{% for message in loop_messages %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\n' +
system_message + '\n<</SYS>>\n\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}{{ ' ' + content.strip() + ' ' + eos_token }}{%- endif %}{% endfor %}""",
    "mixtral": r"""{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}
{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{%- if loop.first and system_message is defined %}
{{- ' [INST] ' + system_message + '\n\n' + message['content'] + ' [/INST]' }}{%- else %}
{{- ' [INST] ' + message['content'] + ' [/INST]' }}{%- endif %}{%- else %}{{- ' ' + message['content'] + eos_token }}
{%- endif %}{%- endfor %}""",
    "llama3": r"""{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] +
'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}
{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "llama3.1": r"""{{- bos_token }}{%- set date_string = "26 Jul 2024" %}{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}{%- else %}
{%- set system_message = "" %}{%- endif %}{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Cutting Knowledge Date: December 2023\n" }}{{- "Today Date: " + date_string + "\n\n" }}{{- system_message }}
{{- "<|eot_id|>" }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] +
'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "chatml": r"""{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' + message.content
+ '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""",
}
TEXTS = ["Which statement?", "The `if` one.\n\nIt is  simple.", "  Why?  \n", "nai\u0308ve 日本語 🎈\t", "0", "\n\nx"]
TEXTS += ["1 + 1 = 2 [INST]"]


def _conversations() -> list[list[dict]]:
    r = random.Random(4)
    out = []
    for turns in (1, 2, 3, 4, 5, 6):
        for system in (None, "", "You are  brief.\n"):
            roles = ("user", "assistant") * 3
            start = [] if system is None else [{"role": "system", "content": system}]
            out.append(start + [{"role": role, "content": r.choice(TEXTS)} for role in roles[:turns]])
    return out


def _chat_tokenizer(family: str, folder):
    config = {"chat_template": TEMPLATES[family]}
    if family.startswith("llama3") or family == "chatml":
        kind = "qwen" if family == "chatml" else "llama3"
        return T.load_tokenizer(_write(folder, tokenizer__json=_json(kind), tokenizer_config__json=config))
    return T.load_tokenizer(_write(folder, tokenizer__model=_model("llama2"), tokenizer_config__json=config))


@pytest.mark.parametrize("family", TEMPLATES)
def test_chat_is_the_familys_template(family, tmp_path):
    ours = _chat_tokenizer(family, tmp_path)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATES[family])
    by_json, name = family.startswith("llama3") or family == "chatml", T.chat_family(ours)
    kind = "qwen" if family == "chatml" else "llama3"
    oracle = tokenizers.Tokenizer.from_str(json.dumps(_json(kind))) if by_json else ours.processor
    bos, eos = ("<|begin_of_text|>", "<|eot_id|>") if by_json else ("<s>", "</s>")
    assert name == family.removesuffix(".1")
    for messages in _conversations():
        asks = messages[-1]["role"] != "assistant"
        text = template.render(messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=asks)
        if by_json:
            expected = oracle.encode(text, add_special_tokens=False).ids
        else:  # sentencepiece puts the space before a part itself
            parts = re.findall("<s>|</s>|(?:(?!</?s>).)+", text, re.DOTALL)
            expected = [
                i for p in parts for i in ({"<s>": [1], "</s>": [2]}.get(p) or oracle.encode(p.removeprefix(" ")))
            ]
        ids, mask = T.render_chat(ours, messages, name)
        assert ids == expected, messages
        assert len(mask) == len(ids)


@pytest.mark.parametrize("family", [*TEMPLATES, "bytes"])
def test_the_mask_is_what_a_model_would_answer(family, tmp_path):
    """An answer's part of the mask is what stands between the prompt for it and the next message."""
    ours = T.ByteTokenizer() if family == "bytes" else _chat_tokenizer(family, tmp_path)
    name = T.chat_family(ours, "llama")
    tail = [*ours.encode("\n")] if name == "chatml" else []  # behind the token that closes a turn
    for messages in _conversations():
        if name == "chatml":  # there, a line feed that begins an answer can be a token with the one before it
            messages = [m | {"content": m["content"].lstrip("\n")} for m in messages]
        ids, mask = T.render_chat(ours, messages, name)
        expected = [0] * len(ids)
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt, none = T.render_chat(ours, messages[:k], name)
                answered, _ = T.render_chat(ours, messages[: k + 1], name)
                assert ids[: len(answered)] == answered and answered[: len(prompt)] == prompt
                words = unicodedata.normalize("NFC", message["content"].strip()) if tail else message["content"].strip()
                assert none[-1] == 0 and ours.decode(answered[len(prompt) :]).strip() == words
                assert answered[len(answered) - len(tail) :] == tail
                del answered[len(answered) - len(tail) :]
                assert answered[-1] == T.turn_end(ours, name)
                expected[len(prompt) : len(answered)] = [1] * (len(answered) - len(prompt))
        assert mask == expected


def test_mixtral_8x22b_has_control_tokens_for_a_turn(tmp_path):
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__model=_model("own symbols")))
    ask, end = ours.control["[INST]"], ours.control["[/INST]"]
    assert T.chat_family(ours) == "mixtral"
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages, e = [{"role": role, "content": content} for role, content in turns], ours.encode
    expected = [1, ask, *e("a"), end, *e("b"), 2, ask, *e("S\n\nc"), end]
    assert T.render_chat(ours, messages, "mixtral")[0] == expected


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_message_cannot_hold_control_tokens(family, tmp_path):
    ours = _chat_tokenizer(family, tmp_path)
    count = {}
    for content in ("x", "".join(SPECIAL) + "</s><s>[/INST]"):
        messages = [{"role": r, "content": content} for r in ("system", "user", "assistant", "user")]
        ids, _ = T.render_chat(ours, messages, T.chat_family(ours))
        count[content] = [i for i in ids if i in ours.control.values()]
    assert len(set(map(tuple, count.values()))) == 1


@pytest.mark.parametrize(
    "roles, message",
    [
        ([], "one message or more"),
        (["system"], "alone"),
        (["assistant"], "message 0: role assistant, expected user"),
        (["user", "user"], "message 1: role user, expected assistant"),
        (["user", "system"], "message 1: role system, expected assistant"),
        (["system", "user", "assistant", "assistant"], "message 3: role assistant, expected user"),
        (["user", "tool"], "role 'tool', expected system, user or assistant"),
        (["user", None], "message 1: expected"),
        (["user", "assistant", "user"], "message 2: the user's content is empty"),
    ],
)
def test_wrong_conversations_are_refused(roles, message, bytes_tokenizer):
    with pytest.raises(UserError, match=re.escape(message)):
        messages = [
            {"role": r, "content": " \n" if roles[2:] == ["user"] and i == 2 else "x"} for i, r in enumerate(roles)
        ]
        T.render_chat(bytes_tokenizer, messages, "llama2")


def test_chat_needs_a_format(bytes_tokenizer):
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    with pytest.raises(UserError, match="message 0"):
        T.render_chat(bytes_tokenizer, messages, "llama2")
    assert [T.chat_family(bytes_tokenizer, m) for m in ("llama", "mixtral")] == ["llama2", "mixtral"]
    with pytest.raises(UserError, match="chat format"):
        T.chat_family(bytes_tokenizer, "gpt2")
