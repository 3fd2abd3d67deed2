"""Text <-> token ids, and conversations -> token ids with a loss mask.

Text is always encoded as ordinary text: no document and no message can produce a control token. BOS, EOS and the tokens
that mark a turn are added by id. There are three kinds of tokenizer: `bytes` needs no file, the tokenizers library
reads a tokenizer.json, and sentencepiece reads a tokenizer.model in a folder without a tokenizer.json. Pickles are
never read.

A tokenizer has encode, decode, decoder (decode, id by id), bos_id, eos_id, stop_ids (the ids that end a generated text;
including BOS, which begins the next document), vocab ({token: id}), vocab_size (largest id + 1), control
({text of a control token: id}), fingerprint (equal for equal ids, on every machine), files (the files that an export
copies), names ({"bos_token": text, ...}), chat_template (from its folder, or "").

A conversation is rendered by its folder's own chat template, in the environment that transformers gives to templates;
a folder without one gets the template of its family in CHAT_TEMPLATES. These follow Llama-2-7b-chat-hf,
Meta-Llama-3-8B-Instruct, Mixtral-8x7B-Instruct and plain ChatML."""

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path

from lib.errors import UserError, local_path, printable, read_file, read_json, read_object, write_json

USUAL_NAMES = {
    "bos_token": ("<|begin_of_text|>", "<s>", "<|endoftext|>"),
    "eos_token": ("<|end_of_text|>", "</s>", "<|endoftext|>"),
}
STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # vocab.json alone is refused
# If two files have the same key, the later file counts.
SETTINGS_FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
COPIED_FILES = (*SETTINGS_FILES[1:], "merges.txt", "added_tokens.json", "chat_template.jinja")
MARK = "\ufdd0\ufdd1"  # two codes that Unicode reserves for internal use, so no text contains them


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


def write_files(tokenizer: Tokenizer, folder: Path, chat_format: str = "") -> dict:
    """Writes a tokenizer's files into a model's folder -> bos_token_id and eos_token_id of its config.json.

    The files are copied unchanged. chat_format: of a model that was trained on conversations. Their template is
    written, the token that ends an answer also ends a text, and tokenizer_config.json makes transformers read all of
    tokenizer.json (its class for Llama reads only the vocabulary)."""
    for file, name in tokenizer.files.items():
        shutil.copyfile(file, folder / name)
    if not tokenizer.files:
        (folder / "tokenizer.json").write_text(BYTES_JSON.replace("VOCAB", json.dumps(tokenizer.vocab)))
    ends, config = tokenizer.eos_ids, folder / "tokenizer_config.json"
    if (chat_format or not tokenizer.files) and (folder / "tokenizer.json").exists():
        settings = read_json(config) or tokenizer.names | {"clean_up_tokenization_spaces": False}
        write_json(config, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    if chat_format:
        chat = chat_template(tokenizer, chat_format)
        (folder / "chat_template.jinja").write_text(chat, "utf-8")
        ids, mask = render_chat(tokenizer, [{"role": r, "content": "x"} for r in ("user", "assistant")], chat)
        turn_end = [i for i, trained in zip(ids, mask, strict=True) if trained][-1]
        ends = sorted({*ends, turn_end})
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}


BYTES_JSON = """{"version": "1.0", "added_tokens": [
 {"id": 256, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
  "special": true},
 {"id": 257, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
  "special": true}],
"decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
"post_processor": {"type": "TemplateProcessing",
 "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
 "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
          {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
 "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}}},
"model": {"type": "BPE", "byte_fallback": true, "merges": [], "vocab": VOCAB}}"""


# ---- chat


def chat_template(tokenizer: Tokenizer, chat_format: str) -> str:
    """The jinja template of the tokenizer's folder; if it has none, ours: by the control tokens, or else by the model's
    chat_format. transformers renders it to the ids of render_chat, if no message holds the text of a control token."""
    if tokenizer.chat_template:
        return tokenizer.chat_template
    if "<|start_header_id|>" in tokenizer.control:
        chat_format = "llama3"
    elif "<|im_start|>" in tokenizer.control:
        chat_format = "chatml"
    template = CHAT_TEMPLATES[chat_format]
    for name in USUAL_NAMES:  # in transformers, the folder's settings may not define them
        template = template.replace(name, repr(tokenizer.names[name]))
    return template


def _raise_exception(message: str) -> None:
    raise UserError(message)


@functools.cache
def _compile_template(tokenizer: Tokenizer, source: str) -> tuple:
    """-> (the template, the expression for a control token)"""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    # With today's date, ids would change overnight. Llama 3.1's template has this date, 3.2's if no clock is defined.
    known = {"raise_exception": _raise_exception, "strftime_now": datetime(2024, 7, 26).strftime}
    longest_first = sorted(tokenizer.control, key=len, reverse=True)
    control = "|".join(re.escape(token) for token in longest_first if len(token) > 1)
    return environment.from_string(source, tokenizer.names | known), control


def _render_parts(tokenizer: Tokenizer, source: str, messages: list[dict]) -> list[str]:
    """-> text, control token, text, ... The text ends with the prompt for an answer if a question is last."""
    try:
        template, control = _compile_template(tokenizer, source)
        # A mark breaks up the control tokens in messages.
        broken = [m | {"content": re.sub(f"(?s)(?={control}).", rf"\g<0>{MARK}", m["content"])} for m in messages]
        asks = messages[-1]["role"] != "assistant"
        text = template.render(messages=broken, add_generation_prompt=asks, tools=None, documents=None)
    except Exception as e:  # a template can raise anything
        raise UserError(f"Chat: the chat template refuses this conversation: {e}") from None
    return [part.replace(MARK, "") for part in re.split(f"({control})", text)]


def render_chat(tokenizer: Tokenizer, messages: list[dict], template: str) -> tuple[list[int], list[int]]:
    """messages [{"role", "content"}] -> (ids, mask). mask is 1 on the assistant's tokens and the control token that
    closes them. If the last message is not the assistant's, the ids end with the prompt for an answer.

    The rendered text is cut at its control tokens, and each part between them is encoded as ordinary text. An answer
    begins behind the text that the template renders for the messages before it, and ends at the next control token."""
    _check_messages(messages)
    parts, prompts = _render_parts(tokenizer, template, messages), {}
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            *before, prompt = _render_parts(tokenizer, template, messages[:k])
            i = len(before)
            if i + 1 >= len(parts) or i in prompts or not parts[i].startswith(prompt):
                raise UserError(f"Chat message {k}: the chat template does not put the answer before a control token")
            prompts[i] = prompt  # the part that holds the answer begins with it
    ids, mask = [], []
    for i, part in enumerate(parts):
        if i % 2:
            new, untrained = [tokenizer.control[part]], int(i - 1 not in prompts)
        else:
            new = tokenizer.encode(part, i == 0)
            untrained = len(tokenizer.encode(prompts[i].rstrip(" "), i == 0)) if i in prompts else len(new)
        ids += new
        mask += [0] * untrained + [1] * (len(new) - untrained)
    return ids, mask


_SYSTEM = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set turns = messages if system is none else messages[1:] %}"""
# The keys llama and mixtral are values of ModelConfig.chat_format. chat_template replaces bos_token and eos_token.
CHAT_TEMPLATES = {
    "llama": _SYSTEM + """
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
{%- if system is not none %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system.strip() + '<|eot_id|>' }}
{%- endif %}
{%- for m in turns %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'].strip() + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}""",
    "mixtral": _SYSTEM + """
{{- bos_token }}
{%- for m in turns %}
{%- if m['role'] == 'user' %}
{%- set before = system + '\\n\\n' if loop.first and system is not none else '' %}
{{- '[INST] ' + before + m['content'] + ' [/INST]' }}
{%- else %}
{{- ' ' + m['content'] + eos_token }}
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
    """A system message may come first, then user, assistant, user, ..."""
    roles = [message.get("role") for message in messages]
    expected = ["system"] * (roles[:1] == ["system"])
    if roles == expected:
        raise UserError("Chat: expected a user's message")
    expected += ["user", "assistant"] * len(roles)
    for i, message in enumerate(messages):
        role, content = expected[i], message.get("content")
        if roles[i] != role or not isinstance(content, str) or not (content.strip() or role == "system"):
            raise UserError(
                f"Chat message {i}: role {roles[i]}, expected {role} with a text (a system message may come first, then"
                f" user and assistant in turn): {str(message)[:200]}"
            )
