"""Text <-> token ids. hf/chat.py renders conversations.

Text is always encoded as ordinary text: no document and no message can produce a control token. BOS, EOS and the tokens
that mark a turn are added by id. There are three kinds of tokenizer: `bytes` needs no file, the tokenizers library
reads a tokenizer.json, and sentencepiece reads a tokenizer.model in a folder without a tokenizer.json. Pickles are
never read.

A tokenizer has encode, decode, decoder (decode, id by id), bos_id, eos_id, stop_ids (the ids that end a generated text;
including BOS, which begins the next document), vocab ({token: id}), vocab_size (largest id + 1), control
({text of a control token: id}), strips ({text of a control token: the characters that it takes [before, after] it}),
reserved (ids that no text may have), is_llama and legacy (of SentencePiece), pad_id (of config.json), fingerprint
(equal for equal ids, on every machine), files (the files that an export copies), names ({"bos_token": text, ...}),
chat_template (its folder's, or "")."""

import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from base.disk import read_file, read_object, write_json
from base.errors import UserError, naming, printable
from base.hub import local_path

USUAL_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}
STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>")
PICTURE = "<image_soft_token>"  # which Gemma 3 1B's tokenizer has beyond the model's vocabulary; no text holds it
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # vocab.json alone is refused
# If two files have the same key, the later file counts.
SETTINGS_FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
COPIED_FILES = (*SETTINGS_FILES[1:], "merges.txt", "added_tokens.json", "chat_template.jinja")
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
PLAIN_TEXT = "The 12 quick  brown foxes' (naïve) jumps ½\n\n\tover 日本語 🎈"  # without the text of a control token
WHITE_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")  # Unicode's
CONVERT = "write a tokenizer.json with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


class Tokenizer:
    """The parts that all kinds share."""

    byte_level, chat_template, is_llama, legacy, pad_id = False, "", False, True, None
    strips, reserved = {}, set()

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        """is_first: whether the text begins a document, instead of following a control token."""
        return self.encode_with_offsets(text, is_first)[0]

    def encode_with_offsets(self, text: str, is_first: bool) -> tuple[list[int], Callable[[], list[tuple[int, int]]]]:
        """-> (ids, a function that gives the place of each of them in the text, in characters)"""
        try:
            text.encode()  # not every library refuses half of a surrogate pair
        except UnicodeEncodeError as e:
            raise UserError(f"The text is not Unicode: {e}") from None
        ids, offsets = self._encode(text, is_first)
        if not self.reserved.isdisjoint(ids):
            raise UserError(f"The tokenizer reads a part of the text {text!r:.80} as a control token")
        return ids, offsets

    def decoder(self) -> Callable[[int | None], str]:
        """-> feed(id): the whole characters that this id completes; feed(None): the rest."""
        ids, shown = [], 0  # the text of ids[:shown] was returned before

        def feed(i: int | None) -> str:
            nonlocal ids, shown
            ids = ids if i is None else [*ids, i]
            before, text = self.decode(ids[:shown]), self.decode(ids)
            is_open = text.endswith("\ufffd") and i is not None  # the next id may complete this character
            if is_open or len(text) <= len(before):
                return ""
            new = text[len(before) :]
            if new.strip():  # decoders remove the spaces that begin a text
                ids = ids[shown:]
            shown = len(ids)
            return new

        return feed


class ByteTokenizer(Tokenizer):
    """256 bytes, then BOS and EOS."""

    bos_id, eos_id, vocab_size, eos_ids, stop_ids = 256, 257, 258, [257], {256, 257}
    control, names = {"<s>": 256, "</s>": 257}, {"bos_token": "<s>", "eos_token": "</s>"}
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | control
    fingerprint, files, adds_bos = "bytes", {}, True

    def _encode(self, text, is_first):
        return list(text.encode()), lambda: [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()]

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class SentencePiece(Tokenizer):
    """A tokenizer.model. Like in transformers, tokenizer_class and two settings decide whether a text gets a space
    before it: add_prefix_space, and legacy, whether also a text that follows a control token. special: tokens of the
    settings; if the model finds them in texts (Gemma), they become control tokens, which it does not."""

    def __init__(self, model: bytes, settings: dict, added: list[dict], special: list[str]):
        from sentencepiece import SentencePieceProcessor

        for token in map(str.encode, special):  # a protobuf message: the text, its score, and 4, a user's symbol
            piece = re.escape(b"\n" + bytes([len(token)]) + token)
            model = re.sub(rb"(?s)(%b\x15.{4}\x18)\x04" % piece, b"\\1\x03", model)

        is_llama = settings.get("tokenizer_class", "").startswith("LlamaTokenizer")
        self.is_llama = is_llama and settings.get("model_type") not in ("mistral", "mixtral")
        has_space = settings.get("add_prefix_space", True) or not self.is_llama
        self.legacy = has_space and settings.get("legacy", not self.is_llama)
        self.adds_bos = settings.get("add_bos_token", True)
        # Of concatenated protobuf messages the last value counts, here normalizer_spec.add_dummy_prefix = false.
        with_space, without_space = (SentencePieceProcessor(model_proto=model + m) for m in (b"", b"\x1a\x02\x18\x00"))
        self.processor = processor = with_space if has_space else without_space
        self.without_space, self.flags = without_space, added
        self.vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
        self.control = {piece: i for piece, i in self.vocab.items() if processor.is_control(i)}

    def _encode(self, text, is_first):
        has_space = text[:1] in (" ", "▁") and (self.is_llama or not self.legacy)
        wants_space = (is_first or self.legacy) and not has_space
        processor = self.processor if wants_space else self.without_space
        return processor.encode(text), lambda: processor.encode_as_offset_mapping(text)["offsets"]

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary."""
        return self.processor.decode([i for i in ids if 0 <= i < self.vocab_size])


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. added: of the settings, with their flags; special: tokens that the settings name; if the
    vocabulary has them, they are also control tokens."""

    def __init__(self, content: bytes, added: list[dict], special: list[str]):
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Backend

        self.backend = backend = Backend.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # encode control tokens in a text as ordinary text
        vocab = backend.get_vocab()
        backend.add_tokens([AddedToken(**token) for token in added if token["content"] in vocab])
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens([text for text in special if text in vocab and text not in known])
        self.vocab, known = backend.get_vocab(), backend.get_added_tokens_decoder().items()
        self.control = {token.content: i for i, token in known if token.special}
        self.flags = [token.__getstate__() for _, token in known if token.special]
        self.byte_level = "ByteLevel" in repr(backend.decoder)
        self.adds_bos, self.decode = bool(backend.encode("").ids), backend.decode
        # Metaspace can put a space before a text, but not behind a control token.
        continued = re.sub(rb'("prepend_scheme":\s*)"first"', rb'\1"never"', content)
        self.continued = backend if continued == content else JsonTokenizer(continued, added, special).backend

    def _encode(self, text, is_first):
        encoding = (self.backend if is_first else self.continued).encode(text, add_special_tokens=False)
        return encoding.ids, lambda: encoding.offsets


def begins_with_bos(tokenizer: Tokenizer, file: Path | None = None) -> bool:
    """Whether a text begins with BOS, as in training, for programs that read the tokenizer's files, or `file`, the
    tokenizer.json of an export. UserError if the ids differ otherwise."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(file)) if file and file.exists() else getattr(tokenizer, "backend", None)
    if not backend:
        if tokenizer.decode(tokenizer.encode(PLAIN_TEXT)) != PLAIN_TEXT:
            raise UserError(f"tokenizer.model normalizes texts, but not in programs that read hf/: {CONVERT}")
        return tokenizer.adds_bos
    backend.no_padding()
    ids, trained = backend.encode(PLAIN_TEXT).ids, tokenizer.encode(PLAIN_TEXT)
    if ids not in (trained, [tokenizer.bos_id, *trained]):
        raise UserError(
            f"tokenizer.json: a text has the ids {ids[:3]} ... {ids[-2:]}, expected nothing besides one BOS: change its"
            " post_processor"
        )
    return ids != trained


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Bytes of the text that each id stands for; 0 for control tokens."""
    sizes = [0] * tokenizer.vocab_size
    for text, i in tokenizer.vocab.items():
        if text not in tokenizer.control:
            # At byte level, each character stands for a byte.
            plain = text if tokenizer.byte_level else re.sub(r"\A<0x[0-9A-F]{2}>\Z|▁", " ", text).encode()
            sizes[i] = len(plain)
    return sizes


def decode_marked(tokenizer: Tokenizer, tokens: list[int], trained: list[bool]) -> str:
    """The text of tokens. Trained tokens are between [[ and ]]."""
    names, feed, text = {i: text for text, i in tokenizer.control.items()}, tokenizer.decoder(), ""
    for token, is_trained in zip(tokens, trained, strict=False):
        piece = printable(names.get(token) or feed(token))
        text += f"[[{piece}]]" if is_trained else piece
    return text.replace("]][[", "")


# ---- files


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


@functools.cache
def load_tokenizer(spec: str) -> Tokenizer:
    """spec: `bytes`, a tokenizer.json or tokenizer.model, the folder of one, or a hub id."""
    if spec == "bytes":
        return ByteTokenizer()
    path = local_path(spec, "--tokenizer")
    files = path, *(path / name for name in TOKENIZER_FILES)
    with naming(f"--tokenizer {path}"):
        return _read_tokenizer(next((file for file in files if file.is_file()), files[1]))


def _read_tokenizer(source: Path) -> Tokenizer:
    folder, data, settings, listed = source.parent, read_file(source), {}, []
    for file in (folder / name for name in SETTINGS_FILES):
        read = read_object(file) if file.is_file() else {}
        settings |= {key: value for key, value in read.items() if value not in (None, [], {})}
    for tokens in (settings.get(key, []) for key in SPECIAL_LISTS):
        listed += map(_text_of, tokens.values() if isinstance(tokens, dict) else tokens)
    names = {key: _text_of(token) for key, token in settings.items() if key.endswith("_token") and token not in (0, 1)}
    added = [*settings.get("added_tokens_decoder", {}).values()]
    special = [*names.values(), *listed, *(token["content"] for token in added if token.get("special"))]
    is_json = data.lstrip().startswith(b"{")
    try:
        tokenizer = JsonTokenizer(data, added, special) if is_json else SentencePiece(data, settings, added, special)
    except Exception as e:  # the libraries' errors have no common class
        raise UserError(f"{source.name} is damaged, or no tokenizer.json or tokenizer.model: {CONVERT} ({e})") from None
    vocab, control, unknown = tokenizer.vocab, tokenizer.control, (names.get("unk_token"), "<unk>", "[UNK]")
    absent = {*listed, *map(_text_of, added)}.difference(vocab, [PICTURE])
    absent |= {*special}.intersection(vocab).difference(control, unknown)
    if absent:
        raise UserError(f"{source.name} lacks special tokens of the settings, {', '.join(sorted(absent))}: {CONVERT}")
    for tokens in (vocab, control):
        tokens.pop(PICTURE, None)
    strips = {t["content"]: [WHITE_SPACE * t.get(end, False) for end in ("lstrip", "rstrip")] for t in tokenizer.flags}
    tokenizer.strips = {text: ends for text, ends in strips.items() if any(ends)}
    tokenizer.reserved = {i for text, i in control.items() if text not in unknown}
    tokenizer.pad_id = settings.get("pad_token_id")
    tokenizer.vocab_size = max(vocab.values()) + 1
    for key, usual in USUAL_NAMES.items():
        names.setdefault(key, next((name for name in usual if name in control), None))
    bos, eos = names["bos_token"], names["eos_token"]
    if not {bos, eos} <= control.keys():
        raise UserError(f"BOS {bos!r} or EOS {eos!r} is no control token: name them in tokenizer_config.json")
    tokenizer.names, tokenizer.bos_id, tokenizer.eos_id = names, control[bos], control[eos]
    ids = settings.get("eos_token_id", [])  # of the model
    tokenizer.eos_ids = (ids if isinstance(ids, list) else [ids]) or [control[eos]]
    tokenizer.stop_ids = {control[name] for name in (bos, eos, *STOP_NAMES) if name in control}.union(tokenizer.eos_ids)
    template = settings.get("chat_template", "")
    if (folder / "chat_template.jinja").is_file():
        template = read_file(folder / "chat_template.jinja").decode()
    elif isinstance(template, list):
        template = next(row["template"] for row in template if row["name"] == "default")
    tokenizer.chat_template = template
    identity = [tokenizer.bos_id, tokenizer.eos_id, sorted(control), template]
    traits = [tokenizer.strips, tokenizer.is_llama, tokenizer.legacy]
    identity += traits if traits != [{}, False, True] else []
    tokenizer.fingerprint = hashlib.sha256(data + json.dumps(identity).encode()).hexdigest()[:16]
    others = COPIED_FILES + TOKENIZER_FILES if source.name in TOKENIZER_FILES else COPIED_FILES
    tokenizer.files = {folder / name: name for name in others if (folder / name).is_file()}
    tokenizer.files[source] = "tokenizer.json" if is_json else "tokenizer.model"
    return tokenizer


def _text_of(token: str | dict) -> str:
    return token["content"] if isinstance(token, dict) else token


# BOS, EOS, and those of our template for Llama 3.
RESERVED = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: Path) -> None:
    """Writes a byte-level BPE with GPT-2's split into a folder that --tokenizer and transformers read. Reserved ids
    fill it up to vocab_size, rounded up to a multiple of 64. The library keeps the words of the texts only once."""
    from tokenizers import ByteLevelBPETokenizer, processors

    backend, (bos, eos, *_) = ByteLevelBPETokenizer(), RESERVED
    backend.train_from_iterator(texts, vocab_size, special_tokens=[*RESERVED], show_progress=sys.stderr.isatty())
    missing = -(-vocab_size // 64) * 64 - backend.get_vocab_size()
    backend.add_special_tokens([f"<|reserved_{i}|>" for i in range(missing)])
    backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 0)])
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    write_json(folder / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
    backend.save(str(folder / "tokenizer.json"))
