"""Conversations: the fields of a row, chat templates, rendering, and the mask of trained tokens. Imports no torch.

A conversation is rendered by its folder's own chat template, in the environment that transformers gives to templates;
a folder without one gets the template of its family in CHAT_TEMPLATES. These follow Llama-2-7b-chat-hf,
Meta-Llama-3-8B-Instruct, Mixtral-8x7B-Instruct and plain ChatML."""

import contextlib
import functools
import json
import re
from datetime import datetime

from lib.errors import UserError
from lib.tokenizer import USUAL_NAMES, Tokenizer

# Fields of conversations: a field with all messages, or a pair of fields (user, assistant) with text or messages.
CHAT_FIELDS = (
    ("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("prompt", "chosen"),
    ("instruction", "output"),
)  # fmt: skip


CHATS_KNOWN = f"{', '.join(' and '.join(names) for names in CHAT_FIELDS)}, or the fields that --chat_fields names"
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
EMPTY = (None, "", "[]", [], {}, 1)  # values of a field that says nothing; 1 is a weight
NOT_RENDERED = ("tool_calls", "function_call", "tool_call_id", "weight", "train")  # fields of a message
BESIDE = ("history", "tools", "functions")  # fields next to a conversation that would have to be rendered as well


def find_messages(row: dict, chat_fields: tuple[str, ...]) -> list[dict] | None:
    """The messages of a row, {"role", "content": text} each; None if the row is not a conversation. chat_fields: as
    --chat_fields names them. The first of three chat_fields, else the row's own `system`, goes before them, unless it
    is null or empty."""
    given = {name: value for name, value in row.items() if value is not None}
    named = chat_fields[-2:], *CHAT_FIELDS
    names = next((names for names in named if names and given.keys() >= set(names)), None)
    if names is None:
        return None
    refuse(row, BESIDE, "the row")
    if names == ("instruction", "output") and given.get("input"):
        given["instruction"] = f"{given['instruction']}\n\n{given['input']}"
    messages = []
    if len(names) == 1 and isinstance(given[names[0]], str):
        given[names[0]] = _parse_messages(given[names[0]], names[0])
    for name, role in zip(names, ("user", "assistant"), strict=False):
        field = given[name] if isinstance(given[name], list) else [{"role": role, "content": given[name]}]
        turns = [read_message(message) for message in field]
        is_whole = turns and turns[0]["role"] != role  # an answer that holds the whole conversation
        messages = turns if is_whole else messages + turns
    system = next((given[name] for name in (*chat_fields[:-2], "system") if given.get(name)), None)
    if system:
        messages = [read_message({"role": "system", "content": system}), *messages]
    return messages


def _parse_messages(text: str, name: str) -> list:
    """The messages of a field that holds them as JSON text."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(messages := json.loads(text), list):
            return messages
    raise UserError(f"{name} is a text, expected a list of messages, also as JSON: {text[:80]!r}")


def refuse(fields: dict, names: tuple[str, ...], place: str) -> None:
    """UserError if a field with one of these names has content, which we do not render."""
    if wrong := [name for name in names if fields.get(name) not in EMPTY]:
        raise UserError(
            f"{place} has {wrong[0]} {str(fields[wrong[0]])[:80]}: tools are not rendered, and answers have no weights:"
            " move earlier turns into the messages, and remove the rest"
        )


def read_message(message) -> dict:
    """A message of a row, its content text or parts of text -> {"role", "content": text}."""
    if not isinstance(message, dict):
        message = {"content": message}
    refuse(message, NOT_RENDERED, "a message")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if isinstance(content, list):
        texts = []
        for part in content:
            match part:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case _:
                    raise UserError(f"the content of a message has a part that is not text: {str(part)[:100]}")
        content = "".join(texts)
    return {"role": SPEAKERS.get(str(role), role), "content": content}


MARK = "\ufdd0\ufdd1"  # two codes that Unicode reserves for internal use, so no text contains them


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


def _cut(tokenizer: Tokenizer, pattern: str, text: str) -> list[str]:
    """-> text, control token, text, ... without the white space that control tokens take."""
    parts = re.split(f"({pattern})", text)
    for i in range(1, len(parts), 2):
        before, after = tokenizer.strips.get(parts[i], ("", ""))
        parts[i - 1 : i + 2] = parts[i - 1].rstrip(before), parts[i], parts[i + 1].lstrip(after)
    return parts


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
    return [part.replace(MARK, "") for part in _cut(tokenizer, control, text)]


def render_chat(tokenizer: Tokenizer, messages: list[dict], template: str) -> tuple[list[int], list[int]]:
    """messages [{"role", "content"}] -> (ids, mask). mask is 1 on the assistant's tokens and the control token that
    closes them. If the last message is not the assistant's, the ids end with the prompt for an answer.

    The rendered text is cut at its control tokens, and each part between them is encoded as ordinary text. An answer
    begins behind the text that the template renders for the messages before it, and ends at the next control token."""
    _check_messages(messages)
    if tokenizer.conditional:
        raise UserError(
            f"Chat: the control tokens {', '.join(tokenizer.conditional)} count only under conditions: set single_word"
            " and normalized to false in tokenizer.json"
        )
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
