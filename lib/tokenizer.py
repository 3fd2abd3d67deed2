"""Text <-> token ids, and conversations -> token ids with a loss mask.

Text is always encoded as ordinary text: nothing in a document or a message can become a control token; BOS, EOS and the
others are added by id. Three kinds of tokenizer share one surface: `bytes` needs no file; sentencepiece reads the
tokenizer.model of Llama 2 and Mixtral; tiktoken runs byte-level BPE, built from a tokenizer.json (GPT-2, Llama 3,
Qwen), from vocab.json + merges.txt (GPT-2) or from the list of ranks that Llama 3 calls tokenizer.model. Each gives the
ids of the library that its files were made for (sentencepiece, tokenizers, tiktoken); a file that asks for more than
that is refused by name. Pickles are never read.

A tokenizer has encode, decode, decoder (decode, id by id), bos_id, eos_id, stop_ids (those that end a generated text;
BOS too: it begins the next document), vocab_size (largest id + 1), control ({text of a control token: id}), fingerprint
(the same where the encoding is, on every machine), files (those that an export copies), chat_template and model_type
(what its folder says, or ""), and leads_with_space (encode puts a space before the text).

Sources: the byte alphabet and expression of GPT-2's encoder.py; Llama 3's tokenizer.py; the chat templates of
Llama-2-7b-chat-hf, Meta-Llama-3-8B-Instruct, Llama-3.1-8B-Instruct, Mixtral-8x7B-Instruct, Mixtral-8x22B-Instruct,
Qwen2.5-7B-Instruct (ChatML in its plain form: without Qwen's default system message, tools and thinking)."""

import base64
import codecs
import functools
import hashlib
import itertools
import json
import re
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lib.errors import UserError, listed, local_path, printable, read_file, read_object

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Digits one by one, then GPT-2's: a run of white space before a digit stays whole, as before the end of the text.
DIGITS_GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
# The parts of an expression that the Oniguruma of tokenizers, the Rust of tiktoken and Python read alike. Left out are
# ^ and $ (line ends in Oniguruma), ignored case apart from contractions (there "ß" is also "ss"), and sets in sets.
_CHARACTER = r"\\[pP]\{\w\w?\}|\\[sSrnt]|\\[!-/:;=?@\[-^`{-~]"
_GROUP = r"\((?!\?)|\(\?(?:[:=!>]|<[=!])|\(\?i:(?:'s\|'t\|'re\|'ve\|'m\|'ll\|'d|\[sdmt\]\|ll\|ve\|re)\)|[)|.]"
_SET = rf"\[\^?(?:{_CHARACTER}|(?!--|~~|&&)[^\[\]\\])+\]"
_TIMES = r"(?:[*+?][+?]?|\{\d+(?:,\d*)?\})(?![*+?{])"
SPLIT_PARTS = re.compile(rf"(?:(?:{_CHARACTER}|{_GROUP}|{_SET}|[^\\^$()\[\]{{}}|.*+?])(?:{_TIMES})?)+")
LLAMA31_DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"  # its templates' own
LLAMA3_CONTROL = {  # behind the ranks come 256 control tokens; the others are reserved
    0: "<|begin_of_text|>",
    1: "<|end_of_text|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    8: "<|eom_id|>",
    9: "<|eot_id|>",
    10: "<|python_tag|>",
}
BOS_NAMES = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>")
STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
SETTINGS_FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
OTHER_FILES = ("merges.txt", "added_tokens.json", "chat_template.jinja", "generation_config.json")
SPACES = 50_000  # in runs of white space a few times as long, tiktoken's regular expressions overflow their stack

_printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
_others = [b for b in range(256) if b not in _printable]
BYTE_OF = {chr(b): b for b in _printable} | {chr(256 + i): b for i, b in enumerate(_others)}  # GPT-2's byte alphabet


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"The text holds half of a surrogate pair (character {e.start}), which is no text") from None


codecs.register_error("each byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))  # as sentencepiece does it


def _cutter(tokens: Iterable[str]) -> re.Pattern:
    """What cuts these tokens out of a text; the longest counts where several begin."""
    return re.compile(f"({'|'.join(sorted(map(re.escape, tokens), key=len, reverse=True))})")


class _Bytes:
    """A tokenizer each of whose ids stands for bytes, whatever is beside it."""

    bytes: dict[int, bytes]
    errors = "replace"

    def decode(self, ids: list[int]) -> str:
        """Control tokens and ids beyond the vocabulary are left out; bytes that are no UTF-8 become U+FFFD."""
        return "".join(map(self.decoder(), [*ids, None]))

    def decoder(self) -> Callable[[int | None], str]:
        """-> feed(id): the text that this id completes; feed(None) the rest. Together they are what decode gives."""
        utf8 = codecs.getincrementaldecoder("utf-8")(self.errors)
        return lambda i: utf8.decode(self.bytes.get(i, b""), final=i is None)


class ByteTokenizer(_Bytes):
    """256 bytes, then BOS and EOS."""

    bos_id, eos_id, vocab_size = 256, 257, 258
    control, stop_ids = {"<s>": 256, "</s>": 257}, frozenset({256, 257})
    fingerprint, files, chat_template, model_type, leads_with_space = "bytes", {}, "", "", False
    eos_ids, adds_bos = [257], True
    bytes = {i: bytes([i]) for i in range(256)}

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return list(text.encode())


class BPE(_Bytes):
    """Byte-level BPE by tiktoken. vocab {bytes: id}; merges [(left, right)], first come first, or None: any two tokens
    that make a third, lowest id first; whole: a piece that is in the vocabulary is that token, merges or not; split:
    what cuts text into pieces; control and words {text: id}: words are cut out of the text before everything else;
    composes: the text between words is put into Unicode's form NFC."""

    def __init__(
        self,
        vocab: dict[bytes, int],
        merges: list[tuple[bytes, bytes]] | None,
        whole: bool,
        split: str,
        control: dict[str, int],
        words: dict[str, int],
        leads_with_space: bool = False,
        composes: bool = False,
    ):
        import tiktoken

        missing = [b for b in range(256) if bytes([b]) not in vocab]
        if missing:
            raise UserError(f"no token for {len(missing)} of the 256 bytes (the first: {missing[0]:#04x})")
        ranks, self.ids = (vocab, None) if merges is None else _ranks(vocab, merges, whole)
        self.control, self.leads_with_space, self.composes = control, leads_with_space, composes
        self.words = {w: [i] for w, i in words.items()}
        self.cut = _cutter(words) if words else None
        self.tiktoken = tiktoken.Encoding("flatland", pat_str=split, mergeable_ranks=ranks, special_tokens={})
        self.bytes = {i: t for t, i in vocab.items()} | {i: w.encode() for w, i in words.items()}
        self.vocab_size = max([*self.bytes, *control.values()]) + 1
        for i in control.values():
            self.bytes.pop(i, None)

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        if self.cut is None:
            return self._encode(text)
        return [i for part in self.cut.split(text) for i in self.words.get(part) or self._encode(part)]

    def _encode(self, text: str) -> list[int]:
        if self.composes:
            text = unicodedata.normalize("NFC", text)
        if self.leads_with_space and text and not text.startswith(" "):
            text = " " + text
        blocks, ids = range(0, len(text) - SPACES + 1, SPACES), None
        try:
            if not any(text[i : i + SPACES].isspace() for i in blocks):
                ids = self.tiktoken.encode_ordinary(text)
        except BaseException as e:
            if type(e).__name__ != "PanicException":  # Rust's, at a long text without a match of the expression
                raise
        if ids is None:
            ids = self.tiktoken._encode_only_native_bpe(text)  # the same, its pieces cut by Python
        return ids if self.ids is None else [self.ids[i] for i in ids]


def _ranks(
    vocab: dict[bytes, int], merges: list[tuple[bytes, bytes]], whole: bool
) -> tuple[dict[bytes, int], list[int] | None]:
    """-> ({token: rank}, rank -> id or None where they are equal) with which tiktoken applies exactly these merges.

    tiktoken merges any two neighbours whose concatenation has a rank; a merge list allows listed pairs alone. While a
    token T forms inside a text, its bytes go through the states that the bytes of T alone go through, so only one pair
    can ever become T: the last two parts of T when merged alone. Tokens that merging their own bytes does not give are
    left out; with the others both ways agree."""
    order = {pair: i for i, pair in enumerate(merges)}
    never = len(merges)
    used = {}  # token: number of the merge that makes it; -1 for bytes
    for token in vocab:
        parts, rank = [token[i : i + 1] for i in range(len(token))], -1
        waiting = [order.get(pair, never) for pair in zip(parts, parts[1:], strict=False)]
        while waiting and (least := min(waiting)) < never:
            i, rank = waiting.index(least), least
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
            del waiting[i]
            for k in range(max(i - 1, 0), min(i + 1, len(waiting))):
                waiting[k] = order.get((parts[k], parts[k + 1]), never)
        if not waiting:
            used[token] = rank
        elif whole:
            used[token] = never
            if len(parts) == 2:
                raise UserError(f"{token!r} is in the vocabulary, but no merge joins {parts[0]!r} and {parts[1]!r}")
    by_rank = sorted(used, key=lambda token: (used[token], vocab[token]))
    merged = [vocab[token] for token in by_rank if -1 < used[token] < never]
    if merged == sorted(merged):
        return {token: vocab[token] for token in by_rank}, None
    return {token: i for i, token in enumerate(by_rank)}, [vocab[token] for token in by_rank]


class SentencePiece(_Bytes):
    """A sentencepiece model; extra {text: id}: tokens its folder adds behind the model's ids; they are control tokens.

    Long texts are encoded in pieces cut behind a line feed, which is up to 4 times as fast, where no token can reach
    across the cut: byte-fallback BPE, no normalization, and a line feed is never a part of a longer token."""

    PIECE = 1_000  # characters, or more
    errors = "each byte"

    def __init__(self, model: bytes, extra: dict[str, int]):
        from sentencepiece import SentencePieceProcessor

        self.processor, self.model = SentencePieceProcessor(model_proto=model), model
        size = self.processor.vocab_size()
        pieces = [self.processor.id_to_piece(i) for i in range(size)]
        extra = {c: i for c, i in extra.items() if i >= size}
        self.control = {pieces[i]: i for i in range(size) if self.processor.is_control(i)} | extra
        self.bytes = {i: self._to_bytes(i) for i in set(range(size)) - set(self.control.values())}
        self.vocab_size = max([size - 1, *extra.values()]) + 1
        parts = dict(_fields(model))
        trainer, normalizer = dict(_fields(parts.get(2, b""))), dict(_fields(parts.get(3, b"")))
        self.leads_with_space = bool(normalizer.get(3, 1)) and not trainer.get(24, 0)
        self.trims = bool(normalizer.get(4, 1))
        self.plain = trainer.get(3) == 2 and trainer.get(35) == 1 and not normalizer.get(2) and not self.trims
        self.inner = None
        if self.plain and self.leads_with_space and not any("\n" in piece and piece != "\n" for piece in pieces):
            self.inner = SentencePieceProcessor(model_proto=model + NO_LEADING_SPACE)

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        if self.inner is None or len(text) < 8 * self.PIECE:  # short ones gain nothing
            return self.processor.encode(text)
        ids, start, processor = [], 0, self.processor
        while start < len(text):
            end = text.find("\n", start + self.PIECE) + 1 or len(text)
            ids += processor.encode(text[start:end])
            start, processor = end, self.inner
        return ids

    def decoder(self) -> Callable[[int | None], str]:
        """As _Bytes has it, but for the space that encode puts before the text, or all that a normalizer removes."""
        feed, begins = super().decoder(), self.leads_with_space or self.trims

        def feed_trimmed(i: int | None) -> str:
            nonlocal begins
            text = feed(i)
            if begins and text:
                text = text.lstrip(" ") if self.trims else text.removeprefix(" ")
                begins = self.trims and not text
            return text

        return feed_trimmed

    def _to_bytes(self, i: int) -> bytes:
        piece = self.processor.decode([i]) if self.processor.is_unknown(i) else self.processor.id_to_piece(i)
        return bytes.fromhex(piece[3:-1]) if self.processor.is_byte(i) else piece.replace("▁", " ").encode()


NORMAL, USER_DEFINED = 1, 4  # types of pieces
NO_LEADING_SPACE = bytes([3 << 3 | 2, 2, 3 << 3 | 0, 0])  # protobuf's way to overrule normalizer_spec.add_dummy_prefix


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of the fields of a protobuf message, as sentencepiece_model.proto describes them."""
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        yield key >> 3, data[at : at + size]
        at += size


Tokenizer = ByteTokenizer | SentencePiece | BPE


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Bytes of the text that each id stands for; 0 for control tokens."""
    return [len(tokenizer.bytes.get(i, b"")) for i in range(tokenizer.vocab_size)]


def decode_marked(tokenizer: Tokenizer, tokens: list[int], trained: list[bool], colour: bool) -> str:
    """The text of tokens: what is trained on in green (or between [[ and ]]), the rest grey."""
    names = {i: text for text, i in tokenizer.control.items()}
    on, off, end = ("\033[32m", "\033[90m", "\033[0m") if colour else ("[[", "", "]]")
    out, feed = "", tokenizer.decoder()
    for is_trained, pairs in itertools.groupby(zip(tokens, trained, strict=False), lambda pair: pair[1]):
        text = printable("".join(names.get(token) or feed(token) for token, _ in pairs))
        out += (on if is_trained else off) + text + end * (is_trained or colour)
    return out


# ---- files


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(spec: str) -> Tokenizer:
    """spec: `bytes`, a tokenizer.json, tokenizer.model or vocab.json, a folder with one of them, or a hub id."""
    if spec == "bytes":
        return ByteTokenizer()
    if not spec:
        raise UserError("--tokenizer: expected bytes, a file, a folder or a hub id, found nothing")
    try:
        path = local_path(spec, "--tokenizer")
    except UserError as e:
        raise UserError(f"{e} (--tokenizer bytes needs no file)") from None
    return _load(path)


@functools.lru_cache(maxsize=4)
def _load(path: Path) -> SentencePiece | BPE:
    folder = path if path.is_dir() else path.parent
    sources = [path] if path != folder else [folder / n for n in TOKENIZER_FILES if (folder / n).is_file()]
    if not sources:
        names = listed(sorted(f.name for f in folder.iterdir())[:10]) or "nothing"
        raise UserError(f"--tokenizer {folder}: no {' or '.join(TOKENIZER_FILES)} in it; it holds {names}")
    try:
        return _read_tokenizer(sources, folder, path == folder)
    except UserError as e:
        raise UserError(str(e) if str(folder) in str(e) else f"--tokenizer {sources[0]}: {e}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as e:
        raise UserError(
            f"--tokenizer {sources[0]}: neither a tokenizer.json, a tokenizer.model nor a vocab.json, or a damaged one"
            f" ({type(e).__name__}: {str(e)[:200]})"
        ) from None


class Beside(NamedTuple):
    """What the other files of a tokenizer's folder say. added: {text: its entry among added tokens}; settings: of
    tokenizer_config.json and its like; config: of config.json and generation_config.json, as for transformers."""

    added: dict[str, dict]
    settings: dict
    config: dict

    def ids(self, which: str) -> list[int]:
        ids = self.config.get(f"{which}_token_id")
        return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]

    def named(self, which: str) -> str | None:
        return _name(self.settings.get(f"{which}_token"))

    def special(self) -> set[str]:
        """The tokens that the settings name."""
        named = [token for key, token in self.settings.items() if key.endswith("_token")]
        return set(map(_name, named + (self.settings.get("additional_special_tokens") or [])))


def _name(token: str | dict | None) -> str | None:
    return token["content"] if isinstance(token, dict) else token


def _read_optional(folder: Path, *names: str) -> dict:
    """What is said in those of these files that are there; the later one wins."""
    files = [read_object(folder / name) for name in names if (folder / name).is_file()]
    return {key: value for file in files for key, value in file.items() if value is not None}


def _read_beside(folder: Path) -> Beside:
    settings = _read_optional(folder, *SETTINGS_FILES)
    added = {c: {"id": i, "special": True} for c, i in _read_optional(folder, "added_tokens.json").items()}
    added |= {t["content"]: {**t, "id": int(i)} for i, t in settings.get("added_tokens_decoder", {}).items()}
    return Beside(added, settings, _read_optional(folder, "config.json", "generation_config.json"))


def _read_tokenizer(sources: list[Path], folder: Path, whole_folder: bool) -> SentencePiece | BPE:
    source, model = sources[0], folder / "tokenizer.model"
    beside, data = _read_beside(folder), read_file(source)
    content = read_object(source) if data.lstrip().startswith(b"{") else {}
    if source.name == "tokenizer.json" and model in sources and not _is_byte_level(content):
        source, data, content = model, read_file(model), {}
    if content and not isinstance(content.get("model"), dict):
        merges = read_file(folder / "merges.txt")
        data += merges
        content = _vocabulary_json(content, merges.decode(), beside.settings)
    if content:
        tokenizer = _from_json(content, beside)
    elif re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data[:1000]):
        tokenizer = _from_ranks(data)
    else:
        tokenizer = SentencePiece(data, {c: t["id"] for c, t in beside.added.items()})
    _set_ends(tokenizer, beside)
    words = sorted(getattr(tokenizer, "words", {}).items())
    rest = json.dumps([tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size, words, tokenizer.leads_with_space])
    tokenizer.fingerprint = hashlib.sha256(data + rest.encode()).hexdigest()[:16]
    tokenizer.chat_template = _chat_template(folder, beside.settings)
    tokenizer.model_type = beside.config.get("model_type", "")
    tokenizer.adds_bos = _adds_bos(content.get("post_processor"), tokenizer, beside.settings)
    default = "tokenizer.json" if content else "tokenizer.model"
    own = source.name if source.name in TOKENIZER_FILES else default
    names = {*SETTINGS_FILES, *OTHER_FILES, *(TOKENIZER_FILES if whole_folder else ())} - {own}
    others = {folder / name: name for name in sorted(names) if (folder / name).is_file()}
    tokenizer.files = {source: own} | others
    return tokenizer


def _steps(content: dict) -> list[dict]:
    steps = content.get("pre_tokenizer") or {}
    return steps["pretokenizers"] if steps.get("type") == "Sequence" else [steps]


def _is_byte_level(content: dict) -> bool:
    return content["model"].get("type", "BPE") == "BPE" and _steps(content)[-1].get("type") == "ByteLevel"


def _vocabulary_json(vocab: dict[str, int], merges: str, settings: dict) -> dict:
    """The tokenizer.json of vocab.json and merges.txt of GPT-2 or Qwen, whose tokenizer_config.json must tell them
    apart."""
    qwen, space = str(settings.get("tokenizer_class")).startswith("Qwen2Tokenizer"), settings.get("add_prefix_space")
    split = {"type": "Split", "pattern": {"Regex": QWEN_SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": bool(space), "use_regex": not qwen}
    pairs = [m for m in merges.splitlines() if m and not m.startswith("#version")]
    return {
        "model": {"vocab": vocab, "merges": pairs},
        "normalizer": {"type": "NFC"} if qwen else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split] * qwen + [level]},
        "decoder": level,
        "added_tokens": [{"content": c, "id": vocab[c], "special": True} for c in BOS_NAMES[-1:] if c in vocab],
    }


def _from_ranks(data: bytes) -> BPE:
    """What Llama 3 calls tokenizer.model."""
    lines = [line.split() for line in data.splitlines() if line]
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(lines))):
        raise UserError("its ranks are not 0, 1, 2, ... without a gap")
    names = {i: f"<|reserved_special_token_{i}|>" for i in range(256)} | LLAMA3_CONTROL
    return BPE(ranks, None, True, LLAMA3_SPLIT, {c: len(ranks) + i for i, c in names.items()}, {})


def _from_json(content: dict, beside: Beside) -> BPE:
    """A tokenizer.json of the tokenizers library, its tokens in GPT-2's byte alphabet. No merge makes the added
    tokens."""
    steps, composes = _steps(content), content.get("normalizer") == {"type": "NFC"}
    _refuse_other_json(content, steps, composes)
    tokens, whole = content["model"]["vocab"], bool(content["model"].get("ignore_merges"))
    added = beside.added | {t["content"]: t for t in content.get("added_tokens") or []}
    ids = {c: t["id"] for c, t in added.items()} | tokens
    _check_ids([*ids.values()])
    special = beside.special() | {c for c, t in added.items() if t.get("special")}
    control = {c: i for c, i in ids.items() if c in special}
    words = {c: t for c, t in added.items() if c not in control}
    _check_words(words, composes)
    texts = [t for t in tokens if t not in control and (t not in words or BYTE_OF.keys() >= set(t))]
    as_bytes = {text: _to_bytes(text) for text in texts}
    pairs = _read_merges(content["model"]["merges"], as_bytes)
    vocab, space = {b: tokens[t] for t, b in as_bytes.items()}, steps[-1].get("add_prefix_space", True)
    return BPE(vocab, pairs, whole, _split(steps), control, {c: ids[c] for c in words}, space, composes)


def _check_ids(ids: list) -> None:
    if len(set(ids)) < len(ids) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise UserError("its ids are not distinct whole numbers")


def _read_merges(merges: list, as_bytes: dict[str, bytes]) -> list[tuple[bytes, bytes]]:
    pairs = [m.split(" ") if isinstance(m, str) else m for m in merges]
    needed = {token for left, right in pairs for token in (left, right, left + right)}
    if absent := sorted(needed - as_bytes.keys()):
        raise UserError(f"its merges need {absent[0]!r}, which is not in the vocabulary")
    return [(as_bytes[left], as_bytes[right]) for left, right in pairs]


def _refuse_other_json(content: dict, steps: list[dict], composes: bool) -> None:
    model, decoder = content["model"], content.get("decoder") or {}
    if not _is_byte_level(content):
        kinds = " + ".join(str(step.get("type")) for step in steps)
        raise UserError(
            f"its model is {model.get('type')}, its pre-tokenizer {kinds}; of a tokenizer.json only byte-level BPE is"
            " read (GPT-2, Llama 3): for Llama 2 and Mixtral give tokenizer.model or a folder with it"
        )
    unused = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    others = {"normalizer": not composes and content.get("normalizer")} | {name: model.get(name) for name in unused}
    for name, value in others.items():
        if value:
            raise UserError(f"{name} {json.dumps(value)[:200]} is not supported, expected none")
    if [step.get("type") for step in decoder.get("decoders", [decoder])] != ["ByteLevel"]:
        raise UserError(f"decoder {json.dumps(decoder)[:200]} is not supported, expected ByteLevel")


def _split(steps: list[dict]) -> str:
    """The expression that cuts text as these steps do, of which the last is ByteLevel."""
    kinds, first, last = [step.get("type") for step in steps], steps[0], steps[-1]
    space, regex = last.get("add_prefix_space", True), last.get("use_regex", True)
    if len(steps) == 1:
        return GPT2_SPLIT if regex else r"[\s\S]+"
    if kinds == ["Digits", "ByteLevel"] and first["individual_digits"] and regex and not space:
        return DIGITS_GPT2_SPLIT
    if kinds == ["Split", "ByteLevel"] and not regex and not space:
        pattern = first["pattern"].get("Regex")
        if pattern and first["behavior"] == "Isolated" and not first["invert"]:
            return _own_split(pattern)
    raise UserError(f"pre_tokenizer {json.dumps(steps)[:400]} is not supported")


def _own_split(expression: str) -> str:
    """What cuts text as a Split with an expression of the file's own does: what it does not match is a piece too."""
    try:
        read_alike = SPLIT_PARTS.match(expression)
        if rest := expression[read_alike.end() if read_alike else 0 :]:
            raise ValueError(f"the tokenizers library may read it differently from {rest[:20]!r} on")
        groups_of_no_number = re.sub(rf"({_CHARACTER}|{_SET})|\((?!\?)", lambda m: m[1] or "(?:", expression)
        parser = getattr(re, "_parser", None) or re.sre_parse  # Python 3.11 and later; 3.10
        if not parser.parse(re.sub(r"\\[pP]\{\w\w?\}", "x", expression)).getwidth()[0]:
            raise ValueError("it matches the empty text")
    except (ValueError, OverflowError, re.error) as e:
        raise UserError(f"pre_tokenizer Split {expression[:300]!r} is not supported: {e}") from None
    own = groups_of_no_number
    return own if own in (LLAMA3_SPLIT, QWEN_SPLIT) else f"{own}|(?:(?!{own})[\\s\\S])+"


def _check_words(words: dict[str, dict], composes: bool) -> None:
    for c, t in words.items():
        if t.get("lstrip") or t.get("rstrip") or t.get("single_word"):
            raise UserError(f"added token {c!r} with lstrip, rstrip or single_word is not supported")
    normalized = {bool(t.get("normalized")) for t in words.values()}
    if len(normalized) > 1 or (composes and True in normalized):
        raise UserError("normalized added tokens beside others, or with the normalizer NFC, are not supported")


def _to_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[c] for c in token])
    except KeyError:
        raise UserError(f"token {token!r} is not written in GPT-2's byte alphabet") from None


def _set_ends(tokenizer: SentencePiece | BPE, beside: Beside) -> None:
    """What begins and ends a text, by the files beside the tokenizer, its model, or its names."""
    control = tokenizer.control

    def end(which: str, names: tuple[str, ...]) -> int | None:
        name = beside.named(which)
        if name is not None and name not in control:
            raise UserError(f"its {which}_token {name!r} ({' or '.join(SETTINGS_FILES)}) is not in the vocabulary")
        return next(iter([control[n] for n in (name, *names) if n in control] + beside.ids(which)), None)

    bos, eos = end("bos", BOS_NAMES), end("eos", EOS_NAMES)
    if bos is None and eos is None:
        raise UserError("no BOS or EOS is known: name bos_token and eos_token in a tokenizer_config.json beside it")
    tokenizer.bos_id, tokenizer.eos_id = eos if bos is None else bos, bos if eos is None else eos
    tokenizer.eos_ids, stops = beside.ids("eos"), [control[n] for n in STOP_NAMES if n in control]
    tokenizer.stop_ids = frozenset([tokenizer.bos_id, tokenizer.eos_id, *tokenizer.eos_ids, *stops])


def _chat_template(folder: Path, settings: dict) -> str:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return read_file(jinja).decode()
    template = settings.get("chat_template", "")
    if isinstance(template, list):
        return next((t["template"] for t in template if t["name"] == "default"), "")
    return template


def _adds_bos(last: dict | None, tokenizer: SentencePiece | BPE, settings: dict) -> bool:
    """Whether transformers puts BOS before a text, given the post_processor of a tokenizer.json."""
    if isinstance(tokenizer, SentencePiece):
        return settings.get("add_bos_token", True)
    steps = (last or {}).get("processors", [last or {}])
    singles = [step["single"] for step in steps if step.get("type") == "TemplateProcessing"]
    first = [single[0].get("SpecialToken", {}).get("id") for single in singles if single]
    return any(tokenizer.control.get(name) == tokenizer.bos_id for name in first)


# The tokenizer.json of `bytes`, but for its 256 bytes.
BYTES_JSON = """{
 "version": "1.0", "truncation": null, "padding": null,
 "added_tokens": [
  {"id": 256, "content": "<s>", "special": true,
   "single_word": false, "lstrip": false, "rstrip": false, "normalized": false},
  {"id": 257, "content": "</s>", "special": true,
   "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}
 ],
 "normalizer": null,
 "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
 "post_processor": {
  "type": "TemplateProcessing",
  "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
  "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
           {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
  "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}
 },
 "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
 "model": {"type": "BPE", "vocab": {}, "merges": []}
}"""


BYTES_SETTINGS = """{
 "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
 "clean_up_tokenization_spaces": false, "model_max_length": 2147483648
}"""
# What is another in that of a sentencepiece model whose encoder puts a space before the text.
PIECES_JSON = """{
 "normalizer": {"type": "Sequence", "normalizers": [
  {"type": "Prepend", "prepend": "▁"},
  {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
 ]},
 "pre_tokenizer": null,
 "decoder": {"type": "Sequence", "decoders": [
  {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
  {"type": "ByteFallback"}, {"type": "Fuse"},
  {"type": "Strip", "content": " ", "start": 1, "stop": 0}
 ]}
}"""


def write_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer.json and tokenizer_config.json with which transformers gives the ids of `bytes`."""
    content = json.loads(BYTES_JSON)
    content["model"]["vocab"] = dict(sorted(BYTE_OF.items(), key=lambda item: item[1])) | ByteTokenizer.control
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=1, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(BYTES_SETTINGS, "utf-8")


def _write_sentencepiece(tokenizer: SentencePiece, folder: Path) -> None:
    """Writes the tokenizer.json with which transformers gives the ids of a plain sentencepiece model, for each text
    between control tokens, or symbols that the model's maker has defined, by itself. A piece can be merged from any two
    pieces that make it up, the one with the highest score first."""
    pieces = [dict(_fields(piece)) for number, piece in _fields(tokenizer.model) if number == 1]
    vocab = {piece[1].decode(): i for i, piece in enumerate(pieces)}
    merges = []
    normal = [text for text, i in vocab.items() if pieces[i].get(3, NORMAL) == NORMAL]
    for text in sorted(normal, key=lambda text: -tokenizer.processor.get_score(vocab[text])):
        pairs = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [pair for pair in pairs if vocab.keys() >= set(pair)]
        merges += sorted(known, key=lambda pair: [*map(vocab.get, pair)])
    symbols = {text: i for text, i in vocab.items() if pieces[i].get(3) == USER_DEFINED}
    bos = _name_of(tokenizer, tokenizer.bos_id)
    unknown = tokenizer.processor.id_to_piece(tokenizer.processor.unk_id())
    content = json.loads(BYTES_JSON.replace('"<s>"', json.dumps(bos)).replace("256", str(tokenizer.bos_id)))
    flags, added = content["added_tokens"][0], tokenizer.control | {unknown: vocab[unknown]} | symbols
    content |= json.loads(PIECES_JSON)
    content["added_tokens"] = [
        flags | {"id": i, "content": text, "special": text not in symbols} for text, i in added.items()
    ]
    if not tokenizer.leads_with_space:
        del content["normalizer"]["normalizers"][0], content["decoder"]["decoders"][-1]
    if not tokenizer.adds_bos:
        content["post_processor"] = None
    model = {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown, "vocab": vocab, "merges": merges}
    content["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), "utf-8")


# ---- chat


def chat_family(tokenizer: Tokenizer, model_type: str = "") -> str:
    """-> a key of CHAT_TEMPLATES, by the tokenizer, its folder, or model_type ("llama" or "mixtral")."""
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= tokenizer.control.keys():
        return "llama3"
    template, model_type = tokenizer.chat_template, tokenizer.model_type or model_type
    asks, has_system = "[INST]" in template, "<<SYS>>" in template
    if {"<|im_start|>", "<|im_end|>"} <= tokenizer.control.keys() and not asks:
        return "chatml"
    if template and not asks:
        begin = template[:60]
        raise UserError(
            f"Chat: its chat_template is none of Llama's or Mixtral's, which are known, nor ChatML with control tokens;"
            f" it begins {begin!r}"
        )
    if (asks and not has_system) or model_type in ("mistral", "mixtral") or "[INST]" in tokenizer.control:
        return "mixtral"
    if model_type == "llama" or has_system:
        return "llama2"
    raise UserError(
        "Chat: neither the tokenizer nor the model says which chat format it was made for (Llama, Mixtral or ChatML)"
    )


MARK = 0xF0000  # of Unicode's private use: the character that stands for a message's words in a template


@functools.lru_cache(maxsize=8)
def _compile_template(tokenizer: Tokenizer, family: str) -> tuple:
    """-> (what renders messages, what cuts the text at control tokens)"""
    import jinja2  # torch needs it, too

    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(chat_template(tokenizer, family))
    return template.render, _cutter(tokenizer.control)


def render_chat(tokenizer: Tokenizer, messages: list[dict], family: str) -> tuple[list[int], list[int]]:
    """messages [{"role", "content"}] -> (ids, mask): mask is 1 on the assistant's tokens and the control token that
    closes them. Where the last message is not the assistant's, the ids end with what asks for an answer.

    The family's template is rendered with a mark in the place of each message's words, and cut at its control tokens;
    what is between them is encoded with the words: so no message can hold a control token."""
    _check_messages(messages)
    render, cut = _compile_template(tokenizer, family)
    strips = ".strip()" in CHAT_TEMPLATES[family]  # then the white space around the words stays for the template
    words = {i: m["content"].strip() if strips else m["content"] for i, m in enumerate(messages, MARK)}
    marked = [m | {"content": m["content"].replace(words[i], chr(i), 1)} for i, m in enumerate(messages, MARK)]
    answers = {chr(i) for i, m in enumerate(messages, MARK) if m["role"] == "assistant"}
    ids, mask, answered = [], [], False
    for part in cut.split(render(messages=marked, add_generation_prompt=messages[-1]["role"] != "assistant")):
        if part in tokenizer.control:
            ids.append(tokenizer.control[part])
            mask.append(int(answered))
            answered = False
            continue
        at = next((i for i, character in enumerate(part) if character in answers), len(part))
        answered, new = at < len(part), tokenizer.encode(part.translate(words))
        asked = len(tokenizer.encode(part[:at].rstrip(" ").translate(words))) if answered else len(new)
        ids += new
        mask += [0] * asked + [1] * (len(new) - asked)
    return ids, mask


def turn_end(tokenizer: Tokenizer, family: str) -> int:
    """The id that closes an answer."""
    return tokenizer.control.get({"llama3": "<|eot_id|>", "chatml": "<|im_end|>"}.get(family), tokenizer.eos_id)


def chat_template(tokenizer: Tokenizer, family: str) -> str:
    """The jinja template with which transformers gives the ids of render_chat, where no message holds the text of a
    control token."""
    lead = "" if tokenizer.leads_with_space else " "
    controlled = {"[INST]", "[/INST]"} <= tokenizer.control.keys()
    values = {
        "bos_token": _name_of(tokenizer, tokenizer.bos_id),
        "eos_token": _name_of(tokenizer, tokenizer.eos_id),
        "dates": LLAMA31_DATES * ("Cutting Knowledge Date" in tokenizer.chat_template),
        "ask": "[INST]" + lead if controlled else lead + "[INST] ",
        "asked": "[/INST]" if controlled else " [/INST]",
        "answer": lead if controlled else " ",
        "system_goes_last": controlled,
    }
    body = CHAT_TEMPLATES[family]
    lines = [f"{{%- set {name} = {json.dumps(v, ensure_ascii=False)} %}}" for name, v in values.items() if name in body]
    return "\n".join(lines) + body


def _name_of(tokenizer: Tokenizer, id_: int) -> str:
    return next((text for text, i in tokenizer.control.items() if i == id_), tokenizer.decode([id_]))


def write_files(tokenizer: Tokenizer, folder: Path, chat: str = "") -> dict:
    """Writes a tokenizer's files into a model's folder -> bos_token_id and eos_token_id of its config.json.

    chat: the family of its conversations, if it has learned some. Then the folder talks in transformers as render_chat
    does: its template goes where versions 4 and 5 look for it, in the place of another one, and tokenizer.json is read
    as it is; an answer's end ends a text, too."""
    for file, name in tokenizer.files.items():
        shutil.copyfile(file, folder / name)
    if isinstance(tokenizer, ByteTokenizer):
        write_byte_tokenizer(folder)
    ends = tokenizer.eos_ids or [tokenizer.eos_id]
    if chat:
        _write_chat_files(tokenizer, folder, chat)
        ends = list(dict.fromkeys([*ends, turn_end(tokenizer, chat)]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}


def _write_chat_files(tokenizer: Tokenizer, folder: Path, family: str) -> None:
    if isinstance(tokenizer, SentencePiece) and tokenizer.plain:
        _write_sentencepiece(tokenizer, folder)
    template, path = chat_template(tokenizer, family), folder / "tokenizer_config.json"
    ends = {"bos_token": _name_of(tokenizer, tokenizer.bos_id), "eos_token": _name_of(tokenizer, tokenizer.eos_id)}
    settings = ends | _read_optional(folder, path.name) | {"chat_template": template}
    if (folder / "tokenizer.json").exists():
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=1, ensure_ascii=False), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")


_SYSTEM = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set turns = messages if system is none else messages[1:] %}"""
# Without what chat_template sets.
CHAT_TEMPLATES = {
    "llama2": _SYSTEM + """
{%- for m in turns %}
{%- if m['role'] == 'user' %}
{%- set before = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' if loop.first and system is not none else '' %}
{{- bos_token + '[INST] ' + (before + m['content']).strip() + ' [/INST]' }}
{%- else %}
{{- ' ' + m['content'].strip() + ' ' + eos_token }}
{%- endif %}
{%- endfor %}""",
    "llama3": _SYSTEM + """
{{- bos_token }}
{%- if dates or system is not none %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + dates + (system or '').strip() + '<|eot_id|>' }}
{%- endif %}
{%- for m in turns %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'].strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "mixtral": _SYSTEM + """
{%- set last = turns | length - (1 if turns[-1]['role'] == 'user' else 2) %}
{{- bos_token }}
{%- for m in turns %}
{%- if m['role'] == 'user' %}
{%- set here = system is not none and loop.index0 == (last if system_goes_last else 0) %}
{{- ask + (system + '\\n\\n' if here else '') + m['content'] + asked }}
{%- else %}
{{- answer + m['content'] + eos_token }}
{%- endif %}
{%- endfor %}""",
    "chatml": """
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
}  # fmt: skip


def _check_messages(messages: list[dict]) -> None:
    """Perhaps a system message, then user, assistant, user, ..."""
    if not isinstance(messages, list) or not messages:
        raise UserError("Chat: expected a list of messages with one message or more")
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not isinstance(m.get("role"), str) or not isinstance(m.get("content"), str):
            raise UserError(f'Chat message {i}: expected {{"role": ..., "content": text}}, found {str(m)[:200]}')
        if m["role"] not in ("system", "user", "assistant"):
            raise UserError(f"Chat message {i}: role {m['role']!r}, expected system, user or assistant")
        if m["role"] != "system" and not m["content"].strip():
            raise UserError(f"Chat message {i}: the {m['role']}'s content is empty")
    first = int(messages[0]["role"] == "system")
    for i, m in enumerate(messages[first:]):
        expected = ("user", "assistant")[i % 2]
        if m["role"] != expected:
            raise UserError(
                f"Chat message {i + first}: role {m['role']}, expected {expected} (a system message may come first,"
                " then user and assistant in turn)"
            )
    if len(messages) == first:
        raise UserError("Chat: a system message alone, expected a user's message after it")
