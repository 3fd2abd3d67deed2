"""hf/tokenizer.py. Oracles: transformers and sentencepiece, on vocabularies that are trained here."""

import io
import json
import random
from functools import cache
from pydoc_data.topics import topics

import pytest
import sentencepiece
import tokenizers
import tokenizers.pre_tokenizers as pre
import transformers

from base.errors import UserError
from config import parse_args
from dataset.prepare import main as run_text_command
from hf import tokenizer as T
from hf.chat import chat_template, render_chat
from hf.weights import write_tokenizer
from inputs import settled_args
from preflight import check_tokenizer

TEXT = [text for _, text in sorted(topics.items())][:40]
SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")

NAMES = "<s> </s> [INST] <unk> <|endoftext|> <tool> ▁ Ġ <0x0A> 's 'LL 'ſ"
UNICODE = "é e\u0301 日本語 नमस्ते ١٢٣ ½ Ⅳ 1234567 👩\u200d👩\u200d👧 🎈 \u200b \U0010ffff ß İ"


def _strings(n: int) -> list[str]:
    """Words, white space, control characters, control tokens' names, Unicode, and mixtures of them."""
    r, words = random.Random(0), " ".join(TEXT[:10]).split(" ")
    odd = ["", "  ", "\r\n", *" \n\t\0\x1c\x7f\x85\xa0\u2003\u2028\u3000\ufeff"]
    odd += [*SPECIAL, *NAMES.split(), *UNICODE.split()]

    def part() -> str:
        code = r.choice((r.randrange(128), r.randrange(0x3000), r.randrange(0xE000, 0x110000)))
        return r.choice((r.choice(words), " " + r.choice(words), r.choice(odd) * r.choice((1, 2, 5)), chr(code)))

    out = ["", *odd, *(c * k for c in odd for k in (2, 3, 17))]
    return out + ["".join(part() for _ in range(r.randrange(1, 20))) for _ in range(n - len(out))]


STRINGS = _strings(350)


@cache
def _train(kind: str) -> str:
    """-> a tokenizer.json, as the tokenizers library writes it."""
    t = tokenizers.Tokenizer(tokenizers.models.BPE())
    t.decoder = tokenizers.decoders.ByteLevel()
    t.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
    if kind != "gpt2":
        pattern = tokenizers.Regex(QWEN_REGEX if kind == "qwen" else LLAMA3_REGEX)
        t.pre_tokenizer = pre.Sequence([pre.Split(pattern, "isolated"), t.pre_tokenizer])
    t.normalizer = tokenizers.normalizers.NFC() if kind == "qwen" else None
    others = {"qwen": ("<|im_start|>", "<|im_end|>"), "granite": ("<|start_of_role|>", "<|end_of_role|>")}
    special = (*SPECIAL[:2], *others[kind]) if kind in others else SPECIAL
    options = {"special_tokens": list(special), "initial_alphabet": pre.ByteLevel.alphabet(), "show_progress": False}
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1500, **options)
    t.train_from_iterator(TEXT, trainer)
    return t.to_str()


def _json(kind: str) -> dict:
    """A tokenizer.json. words: of gpt2, with added tokens that are ordinary text."""
    d = json.loads(_train("gpt2" if kind == "words" else kind))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for i, word in enumerate(("<tool>", "  ", "<tool><tool>", "日本", "the") if kind == "words" else ()):
        d["added_tokens"].append({"id": d["model"]["vocab"].get(word, 1500 + i), "content": word, **flags})
    return d


def _write(folder, **files):
    """Writes name__ext=content into the folder, which it makes -> the folder as a spec."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(folder)


def _stream(tokenizer, ids: list[int]) -> str:
    return "".join(map(tokenizer.decoder(), [*ids, None]))


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "words"])
def test_tokenizer_json_is_exact(kind, tmp_path):
    """Control tokens in a text are text. Truncation that transformers saved in the file is ignored."""
    d, cut = _json(kind), {"max_length": 9, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    ours, r = T.load_tokenizer(_write(tmp_path, tokenizer__json=d | {"truncation": cut})), random.Random(2)
    how = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(d)), **how)
    for text in STRINGS:
        ids = oracle(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True), text
        some = [r.randrange(ours.vocab_size) for _ in range(9)]
        assert ours.decode(some) == _stream(ours, some)
    assert ours.vocab_size == 1 + max([*d["model"]["vocab"].values(), *(t["id"] for t in d["added_tokens"])])
    assert ours.control == {t["content"]: t["id"] for t in d["added_tokens"] if t["special"]}


def test_a_stream_holds_whole_characters(tmp_path):
    text = "na\u00efve \u65e5\u672c\u8a9e \U0001f388 e\u0301"
    for ours in (T.ByteTokenizer(), T.load_tokenizer(_write(tmp_path, tokenizer__model=_model("llama2")))):
        feed = ours.decoder()
        pieces = [feed(i) for i in ours.encode(text)]
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
        assert feed(None) == "" and feed(ours.encode("\u65e5")[-1]) == "" and feed(None) == "\ufffd"
        with pytest.raises(UserError, match="surrogates not allowed"):
            ours.encode("a\ud800b")


def test_a_trained_tokenizer(tmp_path, monkeypatch, capsys):
    """From the beginnings of documents and conversations. The size is a multiple of 64, any text comes back, and
    transformers has the same ids."""
    (tmp_path / "a.txt").write_text("\n".join(TEXT))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "zyxwvu " * 99, "completion": "x" * 9999 + "qqq" * 9999}))
    monkeypatch.setattr("dataset.prepare.SAMPLE", 20_000)
    flags = ["train-tokenizer", "--data", f"{tmp_path}/a.txt", f"{tmp_path}/b.jsonl", "--vocab_size", "1000", "--out"]
    for name in ("one", "two"):
        run_text_command([*flags, f"{tmp_path}/{name}"], parse_args)
    assert f"{tmp_path}/one: 1024 ids, " in capsys.readouterr().out
    one, two = ((tmp_path / name / "tokenizer.json").read_bytes() for name in ("one", "two"))
    assert one == two and "Ġzyxwvu" in one.decode() and "qqq" not in one.decode()
    ours, theirs = T.load_tokenizer(f"{tmp_path}/one"), transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    assert ours.vocab_size == len(theirs) == 1024 and ours.control["<|eot_id|>"] == 4 and ours.adds_bos
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.decode(ids) == theirs.decode(ids) == text
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert sum(render_chat(ours, messages, chat_template(ours, "llama"))[1]) == 2  # y<|eot_id|>
    for more, message in (["one"], "has a tokenizer already"), (["three", "--lr", "1"], "arguments: --lr 1"):
        with pytest.raises(UserError, match=message):
            run_text_command([*flags, f"{tmp_path}/{more[0]}", *more[1:]], parse_args)


# ---- sentencepiece

LLAMA2 = {
    "model_type": "bpe", "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True,
}  # fmt: skip
MODELS = {
    "llama2": {},
    "control": {"control_symbols": ["[INST]", "[/INST]"]},
    "gemma": {
        "add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>",
        "eos_piece": "<eos>", "bos_piece": "<bos>",
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n\n"],
    },
    "unigram": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
}  # fmt: skip


@cache
def _model(kind: str) -> bytes:
    out, sentences = io.BytesIO(), iter("\n".join(TEXT[:20]).split("\n"))
    options = {**LLAMA2, **MODELS[kind], "vocab_size": 1000, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=out, **options)
    return out.getvalue()


def _gemma(folder) -> str:
    """The folder of a tokenizer.model that finds control tokens in texts; a token of pictures has no embedding."""
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
    names |= {"image_token": "<image_soft_token>", "add_eos_token": False}
    added = {4: "<start_of_turn>", 5: "<end_of_turn>", 1000: "<image_soft_token>"}
    added = {str(i): {"content": text, "special": True} for i, text in added.items()}
    settings = {"tokenizer_class": "GemmaTokenizer", **names, "added_tokens_decoder": added}
    files = {"tokenizer_config__json": settings, "config__json": {"model_type": "gemma3_text"}}
    return _write(folder, tokenizer__model=_model("gemma"), **files)


def test_the_tokenizer_model_of_gemma(tmp_path):
    ours, theirs = T.load_tokenizer(spec := _gemma(tmp_path)), transformers.AutoTokenizer.from_pretrained(spec)
    assert (ours.vocab_size, theirs.image_token_id, ours.stop_ids) == (1000, 1000, {1, 2, 5})
    for text in (*STRINGS, "a<end_of_turn>\n\n<image_soft_token><bos>"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True), text
    _same_as_theirs(ours, spec)


@pytest.mark.parametrize("kind", ["llama2", "unigram"])
def test_tokenizer_model_is_exact(kind, tmp_path):
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__model=_model(kind)))
    oracle, r = sentencepiece.SentencePieceProcessor(model_proto=_model(kind)), random.Random(2)
    for text in STRINGS:
        ids = oracle.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == oracle.decode(ids), text
        assert _stream(ours, ids) == oracle.decode(ids), text
        some = [ours.vocab[r.choice(["▁the", "▁", "t", "▁of", "</s>"])] for _ in range(9)]
        assert _stream(ours, some) == oracle.decode([i for i in some if i > 2]), some  # several spaces
    assert (ours.bos_id, ours.eos_id, ours.vocab_size, ours.stop_ids) == (1, 2, 1000, {1, 2})
    assert ours.decode([-1, 1, *oracle.encode("a word"), 2, 1000, 99999]) == "a word"


@pytest.mark.parametrize("kind", ["bytes", "llama3", "llama2"])
def test_sizes_of_tokens_add_up_to_the_bytes_of_the_text(kind, tmp_path):
    ours = T.load_tokenizer(kind if kind == "bytes" else _write(tmp_path, **_files(kind, {})))
    sizes = T.token_sizes(ours)
    for text in filter(None, STRINGS):
        if "\u2581" not in text:  # sentencepiece's own sign for a space
            leading = kind == "llama2"  # it adds a space
            assert sum(sizes[i] for i in ours.encode(text)) == len(text.encode()) + leading, text
    assert len(sizes) == ours.vocab_size and not any(sizes[i] for i in ours.control.values())


# ---- bytes


def test_bytes(tmp_path):
    """Also of the files that an export writes."""
    ours = T.load_tokenizer("bytes")
    assert write_tokenizer(ours, tmp_path) == {"bos_token_id": 256, "eos_token_id": 257}
    theirs, again = transformers.AutoTokenizer.from_pretrained(tmp_path), T.load_tokenizer(str(tmp_path))
    for text in STRINGS:
        ids = ours.encode(text)
        assert ids == list(text.encode()) == again.encode(text)
        assert ours.decode(ids) == theirs.decode(ids) == again.decode(ids) == text == _stream(ours, ids)
        if "s>" not in text:  # there, transformers sees control tokens
            assert theirs(text)["input_ids"] == [256, *ids]
    assert ours.decode([256, 72, 257, 105, 300, -1, 200]) == "Hi\ufffd" and len(theirs) == again.vocab_size == 258


# ---- a tokenizer's folder


@pytest.mark.parametrize("files, eos, stops", [
    ({}, 1, {0, 1, 4}),
    ({"tokenizer_config__json": {"bos_token": None, "eos_token": "<|eot_id|>"}}, 4, {0, 4, 1}),
    ({"special_tokens_map__json": {"eos_token": {"content": "<|eot_id|>"}}}, 4, {0, 4, 1}),
    ({"generation_config__json": {"eos_token_id": [1, 9]}, "config__json": {"eos_token_id": 8}}, 1, {0, 1, 4, 9}),
])  # fmt: skip
def test_ends(files, eos, stops, tmp_path):
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=_json("llama3"), **files))
    assert (ours.bos_id, ours.eos_id, ours.stop_ids) == (0, eos, stops)


def test_files_of_an_export(tmp_path):
    """tokenizer.json is read, tokenizer.model next to it is copied. A file of another name is exported alone, under the
    usual name."""
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=_json("gpt2"), tokenizer__model=b"IQ== 0\nIg== 1\n"))
    assert isinstance(ours, T.JsonTokenizer) and sorted(ours.files.values()) == ["tokenizer.json", "tokenizer.model"]
    _write(tmp_path, mine__json=_json("gpt2"), mine__model=_model("llama2"))
    for name in ("mine.json", "mine.model"):
        assert T.load_tokenizer(str(tmp_path / name)).files == {tmp_path / name: name.replace("mine", "tokenizer")}


def test_fingerprint(tmp_path):
    gpt2, llama3 = ({"tokenizer__json": _json(kind)} for kind in ("gpt2", "llama3"))
    other_bos = gpt2 | {"tokenizer_config__json": {"bos_token": "<|eot_id|>"}}
    kinds = [gpt2, llama3, other_bos, {"tokenizer__model": _model("llama2")}] * 2
    found = [T.load_tokenizer(_write(tmp_path / str(i), **files)).fingerprint for i, files in enumerate(kinds)]
    assert found[:4] == found[4:] and len({T.ByteTokenizer.fingerprint, *found}) == 5


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"
PAD = {"added_tokens_decoder": {"1000": {"content": "<pad>"}}}


def _files(kind: str, settings: dict, **changes) -> dict:
    own = {"tokenizer__model": _model(kind)} if kind in MODELS else {"tokenizer__json": _json(kind) | changes}
    return own | {"tokenizer_config__json": settings}


@pytest.mark.parametrize("files, message", [
    ({}, "tokenizer.json cannot be read"), ({"tokenizer__json": LFS}, "LFS pointer"),
    *(({"tokenizer__json": content}, "damaged") for content in (b'{"model": ', b'{"a":' * 100_000, b"[1, 2]")),
    ({"tokenizer__model": b"\x80\x02}q\x00."}, "a pickle, which can run code"),
    ({"vocab__json": {"a": 0}}, "vocab.json is damaged, or no tokenizer.json"),
    (lambda: _files("gpt2", {"bos_token": "<nope>"}), "BOS '<nope>'"),
    (lambda: _files("gpt2", {}, added_tokens=[]), "name them in tokenizer_config.json"),
    (lambda: _files("gpt2", {"extra_special_tokens": ["<new>"]}), "lacks .* <new>"),
    (lambda: _files("llama2", PAD), "lacks .* <pad>"),
    (lambda: _files("llama2", {"additional_special_tokens": ["▁the"]}), "lacks .* ▁the"),
])  # fmt: skip
def test_files_that_do_not_fit_are_refused(files, message, tmp_path):
    with pytest.raises(UserError, match=f"--tokenizer {tmp_path}.*{message}"):
        T.load_tokenizer(_write(tmp_path, **(files() if callable(files) else files)))


# ---- traits of control tokens

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
DIGITS = {"type": "Split", "pattern": {"Regex": r"\d|\n"}, "behavior": "Isolated", "invert": False}
NESTED = {"type": "Sequence", "pretokenizers": [METASPACE]}
TOOL = {"__type": "AddedToken", "content": "<tool>"}


def _llama2_json(kind: str, folder, legacy: bool = True) -> dict:
    """The tokenizer.json of Llama 2 for a sentencepiece model; transformers finds the merges. legacy: a space also
    begins the text behind a control token."""
    config = {"tokenizer_class": "LlamaTokenizer"}
    spec = _write(folder, tokenizer__model=_model(kind), tokenizer_config__json=config, config__json={})
    d = json.loads(transformers.AutoTokenizer.from_pretrained(spec)._tokenizer.to_str())
    if not legacy:
        return d
    space = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    return d | {"pre_tokenizer": None, "normalizer": {"type": "Sequence", "normalizers": space}}


def _render(tokenizer, text: str) -> list[int]:
    """The ids of a text that a template writes, so its control tokens count."""
    return render_chat(tokenizer, [{"role": "user", "content": "x"}], "{{ " + json.dumps(text) + " }}")[0]


def _same_as_theirs(ours, spec) -> None:
    theirs, r = transformers.AutoTokenizer.from_pretrained(spec), random.Random(3)
    words = [*ours.control, *" \n\x1c\u3000a1日", "  ", "the", " of"]
    for _ in range(80):
        text = "".join(r.choice(words) for _ in range(r.randrange(1, 9)))
        ids = _render(ours, text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == _stream(ours, ids), text


@pytest.mark.parametrize("steps", [[DIGITS, METASPACE], [METASPACE, DIGITS], [DIGITS, NESTED]])
def test_a_space_is_put_before_the_first_text_only(steps, tmp_path):
    d = _llama2_json("control", tmp_path / "model")
    d |= {"normalizer": None, "pre_tokenizer": NESTED | {"pretokenizers": steps}}
    spec = _write(tmp_path, tokenizer__json=d, config__json={})
    _same_as_theirs(T.load_tokenizer(spec), spec)


@pytest.mark.parametrize("kind", [None, "LlamaTokenizer"])
@pytest.mark.parametrize("legacy", [None, True, False])
def test_spaces_of_sentencepiece(kind, legacy, tmp_path):
    """The exported folder states what an absent setting means."""
    settings = {"tokenizer_class": kind, "legacy": legacy}
    config = {key: value for key, value in settings.items() if value is not None}
    spec = _write(tmp_path, tokenizer__model=_model("control"), tokenizer_config__json=config, config__json={})
    ours, hf = T.load_tokenizer(spec), tmp_path / "hf"
    _same_as_theirs(ours, spec)
    _write(hf, config__json={"model_type": "llama"})
    write_tokenizer(ours, hf)
    _same_as_theirs(ours, hf)
    again = T.load_tokenizer(str(hf))
    assert all(_render(again, text) == _render(ours, text) for text in ("the</s>the", " the</s> the"))
    assert again.fingerprint == ours.fingerprint


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized"])
@pytest.mark.parametrize("in_settings", [False, True])
def test_flags_of_control_tokens(flag, in_settings, tmp_path):
    d, config = _json("llama3"), {}
    added = [token | {flag: True} for token in d["added_tokens"]]
    if in_settings:
        config = {"added_tokens_decoder": {str(token.pop("id")): token for token in added}}
    else:
        d["added_tokens"] = added
    spec = _write(tmp_path, tokenizer__json=d, tokenizer_config__json=config, config__json={})
    _same_as_theirs(T.load_tokenizer(spec), spec)


@pytest.mark.parametrize("settings", [
    {"extra_special_tokens": ["<tool>"]}, {"extra_special_tokens": {"tool_token": "<tool>"}},
    {"additional_special_tokens": ["<tool>"]}, {"additional_special_tokens": [TOOL]}, {"eos_token": TOOL},
    {"model_specific_special_tokens": {"tool_token": "<tool>"}}, {"tool_token": "<tool>"}, {"pad_token": "<tool>"},
    {"added_tokens_decoder": {"1500": {"content": "<tool>", "special": True}}},
])  # fmt: skip
def test_every_special_token_is_a_control_token(settings, tmp_path):
    d, config = _json("words"), settings | {"tokenizer_class": "TokenizersBackend"}
    files = {"tokenizer_config__json": config, "config__json": {"pad_token_id": 3}}
    ours = T.load_tokenizer(_write(tmp_path, tokenizer__json=d, **files))
    assert ours.control["<tool>"] == 1500 and 1500 not in ours.encode("<tool> a<tool>")
    _write(tmp_path / "hf", config__json={"model_type": "llama"})
    assert write_tokenizer(ours, tmp_path / "hf")["pad_token_id"] == 3
    written = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    # Transformers 4 knows no TokenizersBackend, and no list of extra_special_tokens.
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(written.get("extra_special_tokens"), list)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


BOS, TWICE, EOS = f"{SPECIAL[0]} $A", f"{SPECIAL[0]} {SPECIAL[0]} $A", f"$A {SPECIAL[1]}"


@pytest.mark.parametrize("adds, settings, begins", [
    (BOS, {}, True), (BOS, {"add_bos_token": False, "add_eos_token": True}, True), (None, {}, False),
    (None, {"add_bos_token": True, "add_eos_token": True}, False),
    (EOS, {}, None), (TWICE, {}, None),
])  # fmt: skip
def test_texts_of_an_export_begin_as_in_training(adds, settings, begins, tmp_path, caplog):
    """begins: whether they begin with BOS; None: the tokenizer is refused."""
    names = [(SPECIAL[0], 0), (SPECIAL[1], 1)]
    processor = adds and tokenizers.processors.TemplateProcessing(adds, special_tokens=names).__getstate__()
    d = _json("llama3") | {"post_processor": processor and json.loads(processor)}
    spec = _write(tmp_path, tokenizer__json=d, tokenizer_config__json=settings)
    ours = T.load_tokenizer(spec)
    _write(tmp_path / "hf", config__json={"model_type": "llama"})
    if begins is None:
        for check in (lambda: check_tokenizer(settled_args(["--tokenizer", spec, "--vocab_size", "2048"])),
                      lambda: write_tokenizer(ours, tmp_path / "hf")):  # fmt: skip
            with pytest.raises(UserError, match="change its post_processor"):
                check()
        return
    write_tokenizer(ours, tmp_path / "hf")
    assert ("other programs will not add it" in caplog.text) == (not begins)
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")("A naïve list")["input_ids"]
    assert ids == [0] * begins + ours.encode("A naïve list")
    caplog.clear()
    write_tokenizer(ours, tmp_path / "hf", "llama")  # the template of a conversation has its BOS
    assert not caplog.records


def test_a_model_that_normalizes_is_refused_until_it_is_converted(tmp_path):
    """Unigram models read every control token in a text, which is refused."""
    spec = _write(tmp_path / "unigram", tokenizer__model=_model("unigram"), config__json={})
    with pytest.raises(UserError, match="normalizes texts.*save_pretrained"):
        check_tokenizer(settled_args(["--tokenizer", spec, "--vocab_size", "2048"]))
    transformers.AutoTokenizer.from_pretrained(spec).save_pretrained(tmp_path)
    ours, hf = T.load_tokenizer(str(tmp_path)), _write(tmp_path / "hf", config__json={"model_type": "llama"})
    write_tokenizer(ours, tmp_path / "hf")
    text = "A \u217ble  \nlist"
    assert transformers.AutoTokenizer.from_pretrained(hf)(text)["input_ids"] == ours.encode(text)
    with pytest.raises(UserError, match="'a</s>' as a control token"):
        ours.encode("a</s>")
    assert ours.encode("\u0d0a")  # unknown, but no control token
