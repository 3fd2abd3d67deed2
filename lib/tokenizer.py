"""Text <-> token ids, and conversations -> token ids with a loss mask.

Text is always encoded as ordinary text: no document and no message can produce a control token. BOS, EOS and the tokens
that mark a turn are added by id. There are three kinds of tokenizer: `bytes` needs no file, the tokenizers library
reads a tokenizer.json, and sentencepiece reads a tokenizer.model in a folder without a tokenizer.json. Pickles are
never read.

A tokenizer has encode, decode, decoder (decode, id by id), bos_id, eos_id, stop_ids (the ids that end a generated text;
including BOS, which begins the next document), vocab ({token: id}), vocab_size (largest id + 1), control
({text of a control token: id}), fingerprint (equal for equal ids, on every machine), files (the files that an export
copies), chat_template and model_type (from its folder, or "").

A conversation is rendered by its folder's own chat template, in the environment that transformers gives to templates;
a folder without one gets a template of its family, from CHAT_TEMPLATES. These follow Llama-2-7b-chat-hf,
Meta-Llama-3-8B-Instruct, Mixtral-8x7B-Instruct, Mixtral-8x22B-Instruct and plain ChatML. The byte alphabet is that of
GPT-2's encoder.py."""

import functools
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from lib.errors import UserError, listed, local_path, printable, read_file, read_object

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<|endoftext|>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<|endoftext|>")
STOP_NAMES = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # vocab.json alone is refused
# If two files have the same key, the later file counts.
SETTINGS_FILES = ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
COPIED_FILES = (*SETTINGS_FILES[1:], "merges.txt", "added_tokens.json", "chat_template.jinja")
PRIVATE_USE = range(0xF0000, 0x10FFFE)  # characters without a meaning in Unicode
TEMPLATE_DATE = datetime(2024, 7, 26)  # the date that Llama 3.1's template has, and 3.2's where no clock is defined

_printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
_others = [b for b in range(256) if b not in _printable]
BYTE_OF = {chr(b): b for b in _printable} | {chr(256 + i): b for i, b in enumerate(_others)}  # GPT-2's byte alphabet


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(
            f"The text holds half of a surrogate pair (character {e.start}): expected whole characters"
        ) from None


class Tokenizer:
    """The parts that all kinds share."""

    def encode_part(self, text: str) -> list[int]:
        """The ids of text that stands behind a control token."""
        return self.encode(text)

    def decoder(self) -> Callable[[int | None], str]:
        """-> feed(id): the whole characters that this id completes; feed(None): the rest."""
        control, ids, shown = {*self.control.values()}, [], 0  # the text of ids[:shown] was returned before

        def feed(i: int | None) -> str:
            nonlocal ids, shown
            if i not in control and i is not None:
                ids = [*ids, i]
            before, text = self.decode(ids[:shown]), self.decode(ids)
            is_open = text.endswith("\ufffd") and i is not None  # the next id may complete this character
            if is_open or len(text) <= len(before):
                return ""
            ids, shown = ids[shown:], len(ids) - shown
            return text[len(before) :]

        return feed


class ByteTokenizer(Tokenizer):
    """256 bytes, then BOS and EOS."""

    bos_id, eos_id, vocab_size, eos_ids, stop_ids = 256, 257, 258, [257], frozenset({256, 257})
    control, vocab, added, files, names = {"<s>": 256, "</s>": 257}, BYTE_OF, {}, {}, {}
    fingerprint, chat_template, model_type = "bytes", "", ""
    byte_level, leads_with_space, adds_bos = True, False, True

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary; invalid UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")


class SentencePiece(Tokenizer):
    """A tokenizer.model."""

    byte_level, added = False, {}

    def __init__(self, model: bytes, settings: dict):
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_proto=model)
        self.vocab = {self.processor.id_to_piece(i): i for i in range(self.processor.vocab_size())}
        self.control = {piece: i for piece, i in self.vocab.items() if self.processor.is_control(i)}
        self.leads_with_space = self.processor.encode("a", out_type=str)[0].startswith("▁")
        self.adds_bos = settings.get("add_bos_token", True)

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return self.processor.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary."""
        return self.processor.decode([i for i in ids if 0 <= i < self.vocab_size])


class JsonTokenizer(Tokenizer):
    """A tokenizer.json."""

    def __init__(self, content: dict, special: list[str]):
        if content["model"].get("dropout"):
            raise UserError("its model has a dropout, so its ids are random: set dropout to null")
        text = json.dumps(content)
        self.backend = _open_library(text, special)
        # Metaspace with the scheme "first" puts a space before a text, but not behind a control token.
        inner = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        self.inner = self.backend if inner == text else _open_library(inner, special)
        self.vocab, self.added = self.backend.get_vocab(), self.backend.get_added_tokens_decoder()
        self.control = {token.content: i for i, token in self.added.items() if token.special}
        self.byte_level = "ByteLevel" in json.dumps(content.get("decoder"))
        if self.byte_level and (missing := BYTE_OF.keys() - self.vocab):
            raise UserError(f"no token for {len(missing)} of the 256 bytes")
        self.leads_with_space = "".join(self.inner.encode("a", add_special_tokens=False).tokens)[:1] in ("▁", "Ġ")

    def encode(self, text: str) -> list[int]:
        _check_text(text)
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_part(self, text: str) -> list[int]:
        _check_text(text)
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Leaves out control tokens and ids beyond the vocabulary."""
        return self.backend.decode([i for i in ids if i >= 0])

    @property
    def adds_bos(self) -> bool:
        return self.backend.encode("a").ids[:1] == [self.bos_id]


def _open_library(text: str, special: list[str]):
    """The tokenizers.Tokenizer of a tokenizer.json. It encodes control tokens in a text as ordinary text."""
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    library.add_special_tokens([token for token in special if library.token_to_id(token) is not None])
    return library


def token_sizes(tokenizer: Tokenizer) -> list[int]:
    """Bytes of the text that each id stands for; 0 for control tokens."""
    sizes = [0] * tokenizer.vocab_size
    for text, i in tokenizer.vocab.items():
        if tokenizer.byte_level and i not in tokenizer.added:
            sizes[i] = len(text)  # each character stands for a byte
        elif i not in tokenizer.control.values():
            is_byte = re.fullmatch("<0x[0-9A-F]{2}>", text)
            sizes[i] = 1 if is_byte else len(text.replace("▁", " ").encode())
    return sizes


def decode_marked(tokenizer: Tokenizer, tokens: list[int], trained: list[bool], colour: bool) -> str:
    """The text of tokens: trained tokens in green (or between [[ and ]]), the others in grey."""
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
    """spec: `bytes`, a tokenizer.json or tokenizer.model, a folder with such a file, or a hub id."""
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
def _load(path: Path) -> SentencePiece | JsonTokenizer:
    folder, source = path.parent, path
    if path.is_dir():
        folder, source = path, next((path / n for n in TOKENIZER_FILES if (path / n).is_file()), None)
    if source is None:
        names = listed(sorted(f.name for f in folder.iterdir())[:10]) or "nothing"
        raise UserError(f"--tokenizer {folder}: no tokenizer.json or tokenizer.model in it; it holds {names}")
    try:
        return _read_tokenizer(source, folder, path == folder)
    except UserError as e:
        raise UserError(str(e) if str(folder) in str(e) else f"--tokenizer {source}: {e}") from None
    except Exception as e:  # the tokenizers library raises nothing more specific
        raise UserError(
            f"--tokenizer {source}: neither a tokenizer.json nor a tokenizer.model, or a damaged one"
            f" ({type(e).__name__}: {str(e)[:200]})"
        ) from None


def _read_settings(folder: Path) -> dict:
    """The settings in a tokenizer's folder; "bos_token" and the like are the token's text."""
    files = [read_object(folder / name) for name in SETTINGS_FILES if (folder / name).is_file()]
    settings = {key: value for file in files for key, value in file.items() if value is not None}
    for key, value in settings.items():
        if key.endswith("_token") and isinstance(value, dict):
            settings[key] = value["content"]
    return settings


def _read_tokenizer(source: Path, folder: Path, whole_folder: bool) -> SentencePiece | JsonTokenizer:
    settings, data = _read_settings(folder), read_file(source)
    added = [*settings.get("added_tokens_decoder", {}).values()]
    names = {key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)}
    content = read_object(source) if source.suffix == ".json" or data.lstrip().startswith(b"{") else {}
    if (content and "model" not in content) or re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data[:1000]):
        raise _needs_json("a list of tokens, as GPT-2's vocab.json or the tokenizer.model of Llama 3")
    if content:
        special = [token["content"] for token in added if token.get("special")]
        tokenizer = JsonTokenizer(content, [*special, *names.values()])
    else:
        tokenizer = SentencePiece(data, settings)
    if absent := [token["content"] for token in added if token["content"] not in tokenizer.vocab]:
        raise _needs_json(f"{absent[0]!r} is an added token of tokenizer_config.json, which this file does not hold")
    tokenizer.vocab_size, tokenizer.names = max(tokenizer.vocab.values()) + 1, names
    _set_ends(tokenizer, settings)
    tokenizer.chat_template = _read_chat_template(folder, settings)
    tokenizer.model_type = settings.get("model_type", "")
    rest = [tokenizer.bos_id, tokenizer.eos_id, sorted(tokenizer.control), tokenizer.chat_template]
    tokenizer.fingerprint = hashlib.sha256(data + json.dumps(rest).encode()).hexdigest()[:16]
    default = "tokenizer.json" if content else "tokenizer.model"
    name = source.name if source.name in TOKENIZER_FILES else default
    others = {*COPIED_FILES, *(TOKENIZER_FILES if whole_folder else ())} - {name}
    tokenizer.files = {source: name} | {folder / n: n for n in sorted(others) if (folder / n).is_file()}
    return tokenizer


def _needs_json(found: str) -> UserError:
    return UserError(
        f"{found}; expected a tokenizer.json. The hub has one next to config.json, or write it with transformers:"
        " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
    )


def _set_ends(tokenizer: Tokenizer, settings: dict) -> None:
    """Finds BOS and EOS by the files in its folder, or else by their usual names."""
    control, ends, ids = tokenizer.control, {}, {}
    for which, usual in (("bos", BOS_NAMES), ("eos", EOS_NAMES)):
        name, value = tokenizer.names.get(f"{which}_token"), settings.get(f"{which}_token_id")
        if name is not None and name not in control:
            raise UserError(f"its {which}_token {name!r} is not in the vocabulary")
        ids[which] = [i for i in (value if isinstance(value, list) else [value]) if type(i) is int]
        ends[which] = next(iter([control[n] for n in (name, *usual) if n in control] + ids[which]), None)
    bos, eos = ends["bos"], ends["eos"]
    if bos is None and eos is None:
        raise UserError("no BOS or EOS is known: name bos_token and eos_token in a tokenizer_config.json in its folder")
    tokenizer.bos_id, tokenizer.eos_id = eos if bos is None else bos, bos if eos is None else eos
    tokenizer.eos_ids, stops = ids["eos"], [control[n] for n in STOP_NAMES if n in control]
    tokenizer.stop_ids = frozenset([tokenizer.bos_id, tokenizer.eos_id, *tokenizer.eos_ids, *stops])


def _read_chat_template(folder: Path, settings: dict) -> str:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return read_file(jinja).decode()
    template = settings.get("chat_template", "")
    if isinstance(template, list):
        return next((t["template"] for t in template if t["name"] == "default"), "")
    return template


def write_files(tokenizer: Tokenizer, folder: Path, chat: str = "") -> dict:
    """Writes a tokenizer's files into a model's folder -> bos_token_id and eos_token_id of its config.json.

    The files are copied unchanged. chat: the format of the conversations that the model was trained on. Then a folder
    without a chat template gets ours, the token that ends an answer ends a text, too, and tokenizer_config.json makes
    transformers read all of tokenizer.json (its class for Llama reads only the vocabulary)."""
    for file, name in tokenizer.files.items():
        shutil.copyfile(file, folder / name)
    if isinstance(tokenizer, ByteTokenizer):
        write_byte_tokenizer(folder)
    ends = tokenizer.eos_ids or [tokenizer.eos_id]
    if chat:
        _write_settings(tokenizer, folder)
        (folder / "chat_template.jinja").write_text(chat_template(tokenizer, chat), "utf-8")
        ids, mask = render_chat(tokenizer, [{"role": r, "content": "x"} for r in ("user", "assistant")], chat)
        turn_end = [i for i, trained in zip(ids, mask, strict=True) if trained][-1]
        ends = list(dict.fromkeys([*ends, turn_end]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}


def _write_settings(tokenizer: Tokenizer, folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = {"clean_up_tokenization_spaces": False} | _names(tokenizer)
    settings |= read_object(path) if path.is_file() else {}
    if (folder / "tokenizer.json").exists():
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=1, ensure_ascii=False), "utf-8")


def write_byte_tokenizer(folder: Path) -> None:
    """Writes a tokenizer.json and tokenizer_config.json: transformers then gives the ids of `bytes`."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, processors

    library = Library(models.BPE(vocab=BYTE_OF, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([*ByteTokenizer.control])
    library.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 256)])
    library.save(str(folder / "tokenizer.json"))
    _write_settings(ByteTokenizer(), folder)


# ---- chat


def chat_family(tokenizer: Tokenizer, model_type: str = "") -> str:
    """-> "own" if the tokenizer's folder has a chat template; else a key of CHAT_TEMPLATES, by the control tokens or
    the model's type ("llama", "mistral" or "mixtral")."""
    control, model_type = tokenizer.control.keys(), tokenizer.model_type or model_type
    if tokenizer.chat_template:
        return "own"
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= control:
        return "llama3"
    if {"<|im_start|>", "<|im_end|>"} <= control:
        return "chatml"
    if model_type in ("mistral", "mixtral") or "[INST]" in control:
        return "mixtral"
    if model_type == "llama":
        return "llama2"
    raise UserError(
        "Chat: neither the tokenizer nor the model says which chat format it was made for (Llama, Mixtral or ChatML)"
    )


def _raise_exception(message: str) -> None:
    raise UserError(message)


def _to_json(value, ensure_ascii: bool = False, **options) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=8)
def _compile_template(tokenizer: Tokenizer, family: str) -> tuple[Callable, str]:
    """-> (render(messages, asks), the expression for a control token)"""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime  # with today's date, ids would change overnight
    # {% generation %} marks an answer, and does not change the text.
    source = re.sub(r"{%(-?)\s*(?:end)?generation\s*(-?)%}", r"{#\1 \2#}", chat_template(tokenizer, family))

    template = None

    def render(messages: list[dict], asks: bool) -> str:
        nonlocal template
        try:
            template = template or environment.from_string(source, tokenizer.names | _names(tokenizer))
            return template.render(messages=messages, add_generation_prompt=asks, tools=None, documents=None)
        except Exception as e:  # a template can raise anything
            raise UserError(f"Chat: the chat template refuses this conversation: {e}") from None

    longest_first = sorted(tokenizer.control, key=len, reverse=True)
    return render, "|".join(re.escape(token) for token in longest_first if len(token) > 1)


def render_chat(tokenizer: Tokenizer, messages: list[dict], family: str) -> tuple[list[int], list[int]]:
    """messages [{"role", "content"}] -> (ids, mask). mask is 1 on the assistant's tokens and the control token that
    closes them. If the last message is not the assistant's, the ids end with the prompt for an answer.

    The rendered text is cut at its control tokens, and each part between them is encoded as ordinary text. During
    rendering, an unused character breaks up the control tokens in messages. An answer begins behind the text that the
    template renders for the messages before it, and ends at the next control token."""
    _check_messages(messages)
    render, control = _compile_template(tokenizer, family)
    used = {character for m in messages for character in m["content"]}
    mark = next(chr(i) for i in PRIVATE_USE if chr(i) not in used)
    first, cut = re.compile(f"(?={control}).", re.DOTALL), re.compile(f"({control})")
    messages = [m | {"content": first.sub(lambda match: match[0] + mark, m["content"])} for m in messages]
    parts = cut.split(render(messages, messages[-1]["role"] != "assistant"))  # text, control token, text, ...
    answers = {}  # {index of the part that holds an answer: offset of the answer in it}
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            *before, prompt = cut.split(render(messages[:k], True))
            i, end = len(before), message["content"].split()[-1]
            closed = i + 1 < len(parts) and parts[i].startswith(prompt) and parts[i].rstrip().endswith(end)
            if not closed or i in answers:
                raise UserError(f"Chat message {k}: the chat template does not put the answer before a control token")
            answers[i] = len(prompt)
    ids, mask = [], []
    for i, part in enumerate(parts):
        if i % 2:
            ids.append(tokenizer.control[part])
            mask.append(int(i - 1 in answers))
            continue
        encode = tokenizer.encode_part if i else tokenizer.encode
        new = encode(part.replace(mark, ""))
        untrained = len(new)
        if i in answers:
            untrained = len(encode(part[: answers[i]].rstrip(" ").replace(mark, "")))
        ids += new
        mask += [0] * untrained + [1] * (len(new) - untrained)
    return ids, mask


def chat_template(tokenizer: Tokenizer, family: str) -> str:
    """The jinja template. transformers renders it to the ids of render_chat, if no message holds the text of a control
    token."""
    if family == "own":
        return tokenizer.chat_template
    lead = "" if tokenizer.leads_with_space else " "
    controlled = {"[INST]", "[/INST]"} <= tokenizer.control.keys()
    values = _names(tokenizer) | {
        "ask": "[INST]" + lead if controlled else lead + "[INST] ",
        "asked": "[/INST]" if controlled else " [/INST]",
        "answer": lead if controlled else " ",
        "system_goes_last": controlled,
    }
    body = CHAT_TEMPLATES[family]
    lines = [f"{{%- set {name} = {json.dumps(v, ensure_ascii=False)} %}}" for name, v in values.items() if name in body]
    return "\n".join(lines) + body


def _names(tokenizer: Tokenizer) -> dict[str, str]:
    texts = {i: text for text, i in (tokenizer.vocab | tokenizer.control).items()}
    return {"bos_token": texts[tokenizer.bos_id], "eos_token": texts[tokenizer.eos_id]}


_SYSTEM = """
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set turns = messages if system is none else messages[1:] %}"""
# chat_template puts the values of their variables before them.
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
    """A system message may come first, then user, assistant, user, ..."""
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
