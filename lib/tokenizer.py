"""Text <-> token ids. lib/chat.py renders conversations.

Text is always encoded as ordinary text: no document and no message can produce a control token. BOS, EOS and the tokens
that mark a turn are added by id. There are three kinds of tokenizer: `bytes` needs no file, the tokenizers library
reads a tokenizer.json, and sentencepiece reads a tokenizer.model in a folder without a tokenizer.json. Pickles are
never read.

A tokenizer has encode, decode, decoder (decode, id by id), bos_id, eos_id, stop_ids (the ids that end a generated text;
including BOS, which begins the next document), vocab ({token: id}), vocab_size (largest id + 1), control
({text of a control token: id}), fingerprint (equal for equal ids, on every machine), files (the files that an export
copies), names ({"bos_token": text, ...}), chat_template (from its folder, or "")."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from lib.errors import UserError, printable
from lib.files import read_file, read_object
from lib.hub import local_path

USUAL_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}
STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # vocab.json alone is refused
# If two files have the same key, the later file counts.
SETTINGS_FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
COPIED_FILES = (*SETTINGS_FILES[1:], "merges.txt", "added_tokens.json", "chat_template.jinja")


class Tokenizer:
    """The parts that all kinds share."""

    byte_level, chat_template = False, ""

    def encode(self, text: str, is_first: bool = True) -> list[int]:
        """is_first: whether the text begins a document, instead of following a control token."""
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UserError(
                f"The text holds half of a surrogate pair (character {e.start}): expected whole characters"
            ) from None
        return self._encode(text, is_first)

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
            ids, shown = ids[shown:], len(ids) - shown
            return text[len(before) :]

        return feed


class ByteTokenizer(Tokenizer):
    """256 bytes, then BOS and EOS."""

    bos_id, eos_id, vocab_size, eos_ids, stop_ids = 256, 257, 258, [257], {256, 257}
    control, names = {"<s>": 256, "</s>": 257}, {"bos_token": "<s>", "eos_token": "</s>"}
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | control
    fingerprint, files, adds_bos = "bytes", {}, True

    def _encode(self, text, is_first):
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class SentencePiece(Tokenizer):
    """A tokenizer.model."""

    def __init__(self, model: bytes, settings: dict):
        from sentencepiece import SentencePieceProcessor

        self.processor = processor = SentencePieceProcessor(model_proto=model)
        self.vocab = {processor.id_to_piece(i): i for i in range(processor.vocab_size())}
        self.control = {piece: i for piece, i in self.vocab.items() if processor.is_control(i)}
        self.adds_bos = settings.get("add_bos_token", True)

    def _encode(self, text, is_first):
        return self.processor.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary."""
        return self.processor.decode([i for i in ids if 0 <= i < self.vocab_size])


class JsonTokenizer(Tokenizer):
    """A tokenizer.json. special: tokens that the settings name; if the vocabulary has them, they are also control
    tokens."""

    def __init__(self, content: bytes, special: Iterable[str]):
        from tokenizers import Tokenizer as Backend

        self.backend = backend = Backend.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # encode control tokens in a text as ordinary text
        backend.add_special_tokens([token for token in special if backend.token_to_id(token) is not None])
        self.vocab, added = backend.get_vocab(), backend.get_added_tokens_decoder()
        self.control = {token.content: i for i, token in added.items() if token.special}
        self.byte_level = "ByteLevel" in repr(backend.decoder)
        self.adds_bos, self.decode = bool(backend.encode("").ids), backend.decode
        self.spaces_first = getattr(backend.pre_tokenizer, "prepend_scheme", "") == "first"

    def _encode(self, text, is_first):
        if self.spaces_first:  # Metaspace puts a space before a text, but not behind a control token
            self.backend.pre_tokenizer.prepend_scheme = "first" if is_first else "never"
        return self.backend.encode(text, add_special_tokens=False).ids


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Bytes of the text that each id stands for; 0 for control tokens."""
    sizes = [0] * tokenizer.vocab_size
    for text, i in tokenizer.vocab.items():
        if text not in tokenizer.control:
            # At byte level, each character stands for a byte.
            plain = text if tokenizer.byte_level else re.sub(r"\A<0x[0-9A-F]{2}>\Z|▁", " ", text).encode()
            sizes[i] = len(plain)
    return sizes


def decode_marked(tokenizer: Tokenizer, tokens: list[int], trained: list[bool], colour: bool) -> str:
    """The text of tokens. Trained tokens are green or between [[ and ]]."""
    names, feed = {i: text for text, i in tokenizer.control.items()}, tokenizer.decoder()
    on, off = ("\033[32m", "\033[0m") if colour else ("[[", "]]")
    text = ""
    for token, is_trained in zip(tokens, trained, strict=False):
        piece = printable(names.get(token) or feed(token))
        text += on + piece + off if is_trained else piece
    return text.replace(off + on, "")


# ---- files


def holds_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def load_tokenizer(spec: str) -> Tokenizer:
    """spec: `bytes`, a tokenizer.json or tokenizer.model, the folder of one, or a hub id."""
    return ByteTokenizer() if spec == "bytes" else _load(local_path(spec, "--tokenizer"))


@functools.cache
def _load(path: Path) -> Tokenizer:
    files = path, *(path / name for name in TOKENIZER_FILES)
    source = next((file for file in files if file.is_file()), files[1])
    try:
        return _read_tokenizer(source)
    except UserError as e:
        raise UserError(f"--tokenizer {path}: {e}") from None
    except Exception as e:  # the libraries raise nothing more specific
        raise UserError(
            f"--tokenizer {path}: {source.name} is damaged, or neither a tokenizer.json nor sentencepiece's"
            f" tokenizer.model ({type(e).__name__}: {str(e)[:200]}). Other formats (vocab.json, tiktoken's) are not"
            " read: download the tokenizer.json next to config.json on the hub, or write it with transformers:"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        ) from None


def _read_tokenizer(source: Path) -> Tokenizer:
    folder, data = source.parent, read_file(source)
    files = [read_object(folder / name) for name in SETTINGS_FILES if (folder / name).is_file()]
    settings = {key: value for file in files for key, value in file.items() if value is not None}
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        if token := settings.get(key):
            names[key] = token["content"] if isinstance(token, dict) else token
    added = settings.get("added_tokens_decoder", {}).values()
    if is_json := data.lstrip().startswith(b"{"):
        tokenizer = JsonTokenizer(data, names.values())
    else:
        tokenizer = SentencePiece(data, settings)
    if absent := {token["content"] for token in added} - tokenizer.vocab.keys():
        raise UserError(f"{source.name} lacks {', '.join(absent)}, which tokenizer_config.json names")
    tokenizer.vocab_size = max(tokenizer.vocab.values()) + 1
    _set_ends(tokenizer, names, settings.get("eos_token_id", []))
    template, jinja = settings.get("chat_template", ""), folder / "chat_template.jinja"
    if isinstance(template, list):
        template = {row["name"]: row["template"] for row in template}.get("default", "")
    tokenizer.chat_template = read_file(jinja).decode() if jinja.is_file() else template
    rest = json.dumps([tokenizer.bos_id, tokenizer.eos_id, sorted(tokenizer.control), tokenizer.chat_template])
    tokenizer.fingerprint = hashlib.sha256(data + rest.encode()).hexdigest()[:16]
    others = (*COPIED_FILES, *TOKENIZER_FILES) if source.name in TOKENIZER_FILES else COPIED_FILES
    tokenizer.files = {folder / name: name for name in others if (folder / name).is_file()}
    tokenizer.files[source] = "tokenizer.json" if is_json else "tokenizer.model"
    return tokenizer


def _set_ends(tokenizer: Tokenizer, names: dict[str, str], ids: int | list[int]) -> None:
    """Finds BOS and EOS by the settings' names, or else by their usual names. ids: eos_token_id of the model."""
    control = tokenizer.control
    for key, usual in USUAL_NAMES.items():
        names.setdefault(key, next((name for name in usual if name in control), None))
    bos, eos = names["bos_token"], names["eos_token"]
    if not {bos, eos} <= control.keys():
        raise UserError(
            f"its BOS {bos!r} or EOS {eos!r} is not a control token: name bos_token and eos_token in a"
            " tokenizer_config.json in its folder"
        )
    tokenizer.names, tokenizer.bos_id, tokenizer.eos_id = names, control[bos], control[eos]
    tokenizer.eos_ids = (ids if isinstance(ids, list) else [ids]) or [control[eos]]
    tokenizer.stop_ids = {control[name] for name in (bos, eos, *STOP_NAMES) if name in control}.union(tokenizer.eos_ids)


# ---- chat
