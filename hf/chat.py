"""Conversations: the fields of a row, chat templates, rendering, and the mask of trained tokens. Imports no torch.

A conversation is rendered by its folder's own chat template, in the environment that transformers gives to templates;
a folder without one gets the template of its family in hf/templates. These follow Llama-2-7b-chat-hf,
Meta-Llama-3-8B-Instruct, Mixtral-8x7B-Instruct and plain ChatML.

The whole conversation is rendered once and encoded once. Before it is encoded, it is decided which characters of this
text are trained on: those between `{% generation %}` and `{% endgeneration %}`, or else each answer from the end of the
prompt for it to the control token that closes it. A token with a trained character is trained on, even if it also holds
the last characters of the prompt: transformers has the same rule."""

import contextlib
import functools
import json
import re
from bisect import bisect, bisect_left
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path

from base.errors import UserError
from hf.tokenizer import Tokenizer

# Fields of conversations: a field with all messages, or a pair of fields (user, assistant) with text or messages.
CHAT_FIELDS = (
    ("messages",), ("conversations",), ("conversation",), ("prompt", "completion"), ("prompt", "chosen"),
    ("instruction", "output"),
)  # fmt: skip
CHATS_KNOWN = f"{', '.join(' and '.join(names) for names in CHAT_FIELDS)}, or the fields that --chat_fields names"
# Names of the preferred answer and of the other one.
ANSWERS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
# Fields with the prompt: text or messages. A row with Alpaca's instruction may also have an input.
PROMPTS = ("prompt", "messages", "conversations", "conversation", "question", "instruction")
PAIRS_KNOWN = "chosen and rejected with a prompt, or as whole conversations (guide/2 lists the forms)"
SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
# The roles that may follow a role; None: the beginning.
FOLLOWS = {
    None: ("system", "developer", "user"),
    "system": ("user",),
    "developer": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
TURN = ("role", "from", "content", "value")  # fields of a message: who speaks, and the text
EMPTY = (None, "", "[]", [], {})  # values of a field that says nothing
# Fields of a row that a template can read.
INPUTS = {
    "tools": list,
    "documents": list,
    "chat_template_kwargs": dict,
}
# Names of the weight of a message; 0 or false leaves it out of the loss.
WEIGHTS = (
    "weight",
    "train",
    "trainable",
    "loss",
)
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first two
KNOWN = ("role", "content", "weight", *REASONING)
# Fields that would change the trained tokens: a row is refused if the template does not render them.
TOLD = (
    "tool_calls",
    "function_call",
    "name",
    "tools",
    "documents",
    "history",
    "functions",
    "mask",
    "masks",
    "loss_mask",
    "loss_weight",
    "train_mask",
    "labels",
)
# Fields of a row or a message that do not belong to the conversation.
BOOKKEEPING = (
    "category", "cluster", "conversation_hash", "country", "created", "dataset", "date", "detoxify_moderation",
    "difficulty", "domain", "finish", "hash", "hashed_ip", "header", "id", "idx", "index", "key", "lang", "language",
    "license", "meta", "metadata", "model", "openai_moderation", "quality", "redacted", "reward", "sample", "score",
    "scores", "source", "split", "state", "subset", "tags", "task", "text", "timestamp", "topic", "toxic", "turn",
    "turns", "type", "url", "uuid",
)  # fmt: skip
BOOKKEEPING_ENDS = (
    "_id",
    "_ids",
    "_score",
    "_scores",
    "_hash",
    "_date",
    "_at",
    "_url",
    "_tokens",
    "_count",
    "_lang",
)
# Templates get this date for today's: otherwise ids would change overnight. Llama 3.1's template has it.
DATE = datetime(2024, 7, 26)
# The format that a tokenizer with this control token has.
FORMATS = {
    "<|start_header_id|>": "llama3",
    "<|im_start|>": "chatml",
    "<start_of_turn>": "gemma",
    "<|start_of_role|>": "granite",
}
# By name; llama and mixtral are values of ModelConfig.chat_format.
CHAT_TEMPLATES = {path.stem: path.read_text() for path in Path(__file__).parent.glob("templates/*.jinja")}

Conversation = tuple[list[dict], dict, dict]  # see make_conversation
Notes = list[tuple[str, str]]  # for the log: (a difference between a row and its training, an example)


# ---- the fields of a row


def find_messages(row: dict, chat_fields: tuple[str, ...]) -> Conversation | None:
    """-> what make_conversation returns; None if the row is not a conversation. chat_fields: none, (user, assistant) or
    (system, user, assistant)."""
    named = chat_fields[-2:], *CHAT_FIELDS
    names = next((names for names in named if names and all(row.get(n) is not None for n in names)), None)
    if names is None:
        return None
    fields = {**row}
    prompt = fields.pop(names[0]) if names == chat_fields[-2:] else take_prompt(fields, names[:1])
    return make_conversation(fields, [prompt, *map(fields.pop, names[1:])], chat_fields)


def find_pair(row: dict, chat_fields: tuple[str, ...]) -> list[Conversation]:
    """-> what make_conversation returns for the conversation with the chosen answer and for the one with the rejected
    answer, where only the last answer is trained on. UserError if the row does not hold a pair, or if the two differ
    before their last answer."""
    names = next((names for names in ANSWERS if all(name in row for name in names)), None)
    if names is None:
        raise UserError(f"--dpo needs pairs of answers, and this row has none: expected {PAIRS_KNOWN}")
    fields = {name: value for name, value in row.items() if name not in names}
    question, found = take_prompt(fields), []
    for name in names:
        answer = (row[name] or "") if question else parse_field(row[name], name)
        turns = question, [answer] if isinstance(answer, dict) else answer
        messages, inputs, unread = make_conversation(fields, turns, chat_fields)
        has_answer = len(messages) > 1 and messages[-1]["role"] == "assistant"
        earlier = [m | {"weight": 0} if m["role"] == "assistant" else m for m in messages[:-1]]
        found.append(([*earlier, *messages[-1:]], inputs, unread))
        if not has_answer or earlier != found[0][0][:-1]:
            raise UserError(f"{' and '.join(names)} differ before their last answer, or {name} does not end with one")
    return found


def take_prompt(fields: dict, names: tuple[str, ...] = PROMPTS) -> str | list:
    """Takes the prompt out of a row's fields -> its text or its messages; [] if there is none. names: where it may be;
    the row may also have `messages` with an answer, as UltraFeedback's has beside `prompt`."""
    if isinstance(fields.get("input"), dict) and not any(map(fields.get, names)):  # OpenAI's form
        fields |= fields.pop("input")
    name = next((name for name in names if fields.get(name)), names[0])
    prompt = fields.pop(name, None)
    if name == "instruction" and fields.get("input"):
        prompt = f"{prompt}\n\n{parse_field(fields.pop('input'), 'input', str)}"
    if name in ("messages", "conversations", "conversation"):
        return parse_field(prompt, name)
    return [] if prompt is None else prompt


def make_conversation(
    fields: dict, turns: Sequence, chat_fields: tuple[str, ...] = ()
) -> tuple[list[dict], dict, dict]:
    """-> (the messages, {"role", "content": text} and more fields each; other inputs of the template; fields that
    nothing reads). turns: what the user says, and the assistant: a text or messages; an answer may hold the whole
    conversation. fields: the row's others. Of these, the system field of chat_fields, else `system`, goes before the
    messages, unless it is null or empty."""
    messages = []
    for role, turn in zip(("user", "assistant"), turns, strict=False):
        added = [_read_message(m) for m in (turn if isinstance(turn, list) else [{"role": role, "content": turn}])]
        is_whole = added and added[0].get("role") != role
        messages = added if is_whole else messages + added
    fields = {name: value for name, value in fields.items() if value not in EMPTY}
    system = next((name for name in (*chat_fields[:-2], "system") if name in fields), None)
    if system:
        messages = [_read_message({"role": "system", "content": fields.pop(system)}), *messages]
    inputs = {name: parse_field(fields.pop(name), name, kind) for name, kind in INPUTS.items() if name in fields}
    inputs |= inputs.pop("chat_template_kwargs", {})
    return messages, inputs, fields


def parse_field(value, name: str, kind: type = list):
    """A list, dict or text; a list or dict may be JSON text."""
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        value = value if isinstance(value, kind) else json.loads(value)
    if isinstance(value, kind):
        return value
    raise UserError(f"{name} is {value!r:.80}, expected a {kind.__name__}, also as JSON")


def map_values(value, function: Callable):
    """A copy of nested lists and dicts, with function(x) instead of each key and value x in them."""
    if isinstance(value, dict):
        return {function(name): map_values(part, function) for name, part in value.items()}
    return [map_values(part, function) for part in value] if isinstance(value, list) else function(value)


def _read_message(message) -> dict:
    """A message of a row -> {"role", "content": text, ...}, and "weight": 0 if it is not trained on. Arguments of tool
    calls that are JSON text become objects, as vLLM gives them to templates."""
    if not isinstance(message, dict):
        message = {"content": message}
    speaker, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    role = SPEAKERS.get(str(speaker), speaker)
    out = {name: value for name, value in message.items() if value not in EMPTY and name not in TURN}
    if isinstance(content, list):
        with contextlib.suppress(KeyError, TypeError):  # other parts are refused later
            content = "".join({"text": part["text"]}[part["type"]] for part in content)
    weights = [out.pop(name) for name in WEIGHTS if name in out]
    if any(weight not in (0, 1) or (weight == 1 and role != "assistant") for weight in weights):
        raise UserError(f"a weight is 0 for a message without training, and 1 for answers only: {message!r:.200}")
    if 0 in weights:
        out["weight"] = 0
    if speaker == "function_call":
        function, content = parse_field(content, "function_call", dict), None
        out["tool_calls"] = [{"type": "function", "function": function}]
    if "tool_calls" in out:
        out["tool_calls"] = [_read_call(call) for call in parse_field(out["tool_calls"], "tool_calls")]
    return out | {"role": role} | ({} if content is None else {"content": content})


def _read_call(call) -> dict:
    call = parse_field(call, "a tool call", dict)
    function = parse_field(call.get("function", call), "a tool call", dict)
    with contextlib.suppress(TypeError, ValueError):  # other arguments stay unchanged
        function = function | {"arguments": json.loads(function.get("arguments"))}
    return call | {"function": function} if "function" in call else function


# ---- templates

# Codes that Unicode reserves for internal use. `_break_up` refuses conversations that hold them.
MARK = "\ufdd0"  # breaks up the control tokens in messages
OPEN, CLOSE = "\ufdd2", "\ufdd3"  # around the texts that a template calls generated
OTHER = "\ufdd4"  # another answer


def chat_template(tokenizer: Tokenizer, chat_format: str) -> str:
    """The jinja template of the tokenizer's folder, or else ours: by the control tokens, or else by the model's
    chat_format. transformers renders it to the ids of render_chat, if no message holds the text of a control token."""
    if tokenizer.chat_template:
        return tokenizer.chat_template
    return CHAT_TEMPLATES[next((FORMATS[token] for token in FORMATS if token in tokenizer.control), chat_format)]


def _raise_exception(message: str) -> None:
    raise UserError(message)


@functools.cache
def _compile_template(tokenizer: Tokenizer, source: str) -> tuple:
    """-> (the template, the expression for a control token)"""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # {% generation %} ... {% endgeneration %} is a scope. They keep their control of white space.
    source = re.sub(r"{%([-+]?)\s*generation\b", rf"{{%\1 with %}}{OPEN}{{% if true", source)
    source = re.sub(r"{%([-+]?)\s*endgeneration\b", rf"{{%\1 endif %}}{CLOSE}{{% endwith", source)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    known = {"raise_exception": _raise_exception, "strftime_now": DATE.strftime}
    longest_first = sorted(tokenizer.control, key=len, reverse=True)
    control = "|".join(re.escape(token) for token in longest_first if len(token) > 1)
    return environment.from_string(source, tokenizer.names | known), re.compile(control)


def _break_up(text, control: re.Pattern):
    """The text with MARK inside each control token, so that none is encoded as one. UserError if it holds our codes."""
    if not isinstance(text, str):
        return text
    if re.search(f"[{MARK}-{OTHER}]", text):
        raise UserError("Chat: remove U+FDD0 to U+FDD4 from the text: they are not characters")
    return re.sub(f"(?s)(?={control.pattern}).", rf"\g<0>{MARK}", text)


# ---- rendering


def render_chat(
    tokenizer: Tokenizer, messages: list[dict], template: str, inputs: dict | None = None, notes: Notes | None = None,
    others: dict | None = None,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """messages [{"role", "content", ...}] -> (ids, mask). mask is 1 on the assistant's tokens and the token that closes
    them, but 0 on an earlier answer whose text the template leaves out in part; UserError if that is the last message.
    If the last message is not the assistant's, the ids end with the prompt for an answer. inputs: `tools` and other
    variables of the template. notes: a list for what the template changes or leaves out. others: fields of the row that
    nothing reads."""
    compiled, control = _compile_template(tokenizer, template)
    inputs, others = {"tools": None, "documents": None} | (inputs or {}), others or {}
    notes = [] if notes is None else notes
    messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
    _check_messages(messages)
    _note_unread(others, "", notes)
    for fields in (inputs, *messages):
        _note_unread(fields, template, notes)
    for message in messages:
        reasoning = [message.pop(name) for name in REASONING if name in message]
        if reasoning:
            message |= dict.fromkeys(REASONING[:2], reasoning[0])
    inputs, messages = map_values([inputs, messages], lambda text: _break_up(text, control))

    def render(messages, asks=None, inputs=inputs):
        asks = messages[-1]["role"] != "assistant" if asks is None else asks
        try:
            return compiled.render(messages=messages, add_generation_prompt=asks, **inputs)
        except Exception as e:  # of any kind
            raise UserError(f"Chat: the chat template refuses this conversation: {e}") from None

    text = render(messages)
    _refuse_lost(render, messages, inputs, others, text)
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if OPEN in text:
        parts = re.split(f"[{OPEN}{CLOSE}]", text)
        text, ends = "".join(parts), [*accumulate(map(len, parts))]
        if len(answers) != len(parts) // 2:
            raise UserError(f"Chat: the chat template marks {len(parts) // 2} texts in {len(answers)} answers")
        places = dict(zip(answers, zip(ends[:-1:2], ends[1::2], strict=True), strict=True))
    else:
        places = _find_answers(render, messages, answers, text, control)
    trained = bytearray(len(text))
    for begin, end in _choose_answers(messages, places, text, control, notes):
        trained[begin:end] = b"\1" * (end - begin)
    ids, mask = _encode(tokenizer, text, trained, control)
    if ids[:2] == [tokenizer.bos_id] * 2:
        notes.append(("the chat template begins with BOS twice", text))
    return ids, mask


def _note_unread(fields: dict, template: str, notes: Notes) -> None:
    """Notes fields of a row or a message that neither the template nor anything else reads."""
    for name, value in fields.items():
        is_known = name in template or name in TOLD or name.lower() in (*KNOWN, *BOOKKEEPING)
        if not (is_known or name.lower().endswith(BOOKKEEPING_ENDS)):
            notes.append((f"nothing reads the field {name}", str(value)))


def _refuse_lost(render, messages, inputs, others, text) -> None:
    """UserError if the text is the same without a field of TOLD. A tool that answers may have a name that is lost."""
    speakers = [message for message in messages if message["role"] != "tool"]
    told = {name: part[name] for part in (others, inputs, *speakers) for name in TOLD if part.get(name) not in EMPTY}
    for name, value in told.items():
        without = [m if m["role"] == "tool" else {n: v for n, v in m.items() if n != name} for m in messages]
        try:
            is_lost = render(without, inputs=inputs | {name: None}) == text
        except UserError:
            continue  # the template needs the field
        if is_lost:
            raise UserError(f"Chat: the chat template does not render {name}: {value!r:.80}")


def _check_messages(messages: list[dict]) -> None:
    """The roles must follow each other as in FOLLOWS, and each message needs a text. A system message and a tool's
    answer may be empty, and so may an answer that calls tools or reasons."""
    last = None
    for i, message in enumerate(messages or [{}]):
        role, content, expected = message.get("role"), message.get("content", ""), FOLLOWS[last]
        may_be_empty = role in ("system", "tool") or message.keys() & {"tool_calls", *REASONING}
        if role not in expected or not isinstance(content, str) or not (may_be_empty or content.strip()):
            raise UserError(f"Chat message {i}: expected {' or '.join(expected)} with a text: {message!r:.200}")
        last = role


def _find_answers(render, messages, answers, text, control) -> dict[int, tuple[int, int]]:
    """The place of each answer in the rendered text, from the end of the prompt for it to the end of the control token
    that closes it; (0, 0) if it has the weight 0, or if the template leaves it out or does not close it."""
    places, last_end = {}, 0
    for k in answers:
        places[k] = 0, 0
        if messages[k].get("weight") == 0:
            continue
        prompt = render(messages[:k], True)
        until = text if k == len(messages) - 1 else render(messages[: k + 1])
        end = max((match.end() for match in control.finditer(until)), default=0)
        if until[end:].strip():
            continue
        if until.startswith(prompt) and text.startswith(until):
            places[k] = len(prompt), end
        else:
            places[k] = _find_answer(render, messages, k, text, control, prompt, last_end)
        last_end = max(places[k][1], last_end)
    return places


def _find_answer(render, messages, k, text, control, prompt, last_end) -> tuple[int, int]:
    """The place of message k where the template renders earlier messages differently once later ones follow, for
    example without their reasoning; (0, 0) if it leaves the message out. last_end: of the answer before it.

    The conversation is rendered with another answer here: the characters that differ are the answer's words. The place
    begins behind the last copy of the header, by which the prompt is longer than the question, and ends with the next
    control token. Where the header opens a thought that the answer closes at once, only its beginning is there."""
    other = {"role": "assistant", "content": OTHER}
    try:
        changed = render([*messages[:k], other, *messages[k + 1 :]])
    except UserError:  # a tool's answer needs the call
        other_function = {"function": {"name": OTHER, "arguments": {}}}
        other["tool_calls"] = [call | other_function for call in messages[k].get("tool_calls", [])]
        changed = render([*messages[:k], other, *messages[k + 1 :]])
    if OTHER not in changed:
        return 0, 0
    words_begin = _count_shared(text, changed)
    words_end = len(text) - _count_shared(text[::-1], changed[::-1])
    end = next((match.end() for match in control.finditer(text) if match.end() > words_end), len(text))
    begin = len(text[:words_begin].rstrip(" "))
    header = prompt[_count_shared(prompt, render(messages[:k], False)) :]
    stops = accumulate(map(len, re.split(rf"({control.pattern}|\s+)", header)))
    for stop in reversed([*filter(None, stops)]):
        if (at := text.rfind(header[:stop], last_end, words_begin)) >= 0:
            begin = at + stop
            break
    return min(begin, end), end


def _count_shared(a: str, b: str) -> int:
    """The length of the beginning that two texts share."""
    return bisect(range(1, min(len(a), len(b)) + 1), False, key=lambda n: a[:n] != b[:n])


def _choose_answers(messages, places, text, control, notes) -> list[tuple[int, int]]:
    """The places that are trained on: of the answers that have a weight and whose text is all there; white space does
    not count. Notes texts that the template changes or leaves out; UserError if that is a part of an answer that ends
    the messages."""
    controls, chosen = [0, *(match.start() for match in control.finditer(text))], []
    for k, message in enumerate(messages):
        is_trained = message["role"] == "assistant" and message.get("weight") != 0
        begin, end = places[k] if is_trained else (0, len(text))
        # From a control token on, because the prompt for the answer may open its thought.
        header = controls[max(bisect_left(controls, begin) - 1, 0)]
        written, lost = "".join(text[header:end].split()), ""
        for name in ("content", "reasoning_content"):  # the content stands behind the reasoning
            words = str(message.get(name, ""))
            if words.strip():
                written, is_there, _ = written.rpartition("".join(words.split()))
                lost = lost if is_there else words.replace(MARK, "")
        what = f"the chat template changes or leaves out text of the {message['role']}"
        if lost and is_trained and k == len(messages) - 1:
            raise UserError(f"Chat: {what}'s last answer: {lost!r:.100}: use a chat template that keeps it")
        if lost:
            notes.append((f"{what}'s earlier answer: it is not trained on" if is_trained else what, lost))
        elif is_trained:
            chosen.append((begin, end))
    return chosen


def _encode(tokenizer: Tokenizer, text: str, trained: bytearray, control: re.Pattern) -> tuple[list[int], list[int]]:
    """-> (ids, mask). The text between two control tokens is encoded as ordinary text, without the white space that
    control tokens take. trained: 1 for each character that is trained on."""
    ids, mask, at, after = [], [], 0, ""
    for match in (*control.finditer(text), None):  # None: the text after the last control token
        before, next_after = tokenizer.strips.get(match and match[0], ("", ""))
        part = text[at : match and match.start()].rstrip(before)
        start = at + len(part) - len(part.lstrip(after))
        part, marks = text[start : at + len(part)], trained[start : at + len(part)]
        if MARK in part:
            marks = bytes(on for c, on in zip(part, marks, strict=True) if c != MARK)
        new, offsets = tokenizer.encode_with_offsets(part.replace(MARK, ""), at == 0)
        ids += new
        mask += _mark_tokens(offsets(), marks) if any(marks) else [0] * len(new)
        if match:
            ids.append(tokenizer.control[match[0]])
            mask.append(trained[match.start()])
            at, after = match.end(), next_after
    return ids, mask


def _mark_tokens(offsets: list[tuple[int, int]], trained: bytes) -> list[int]:
    """1 for each token with a trained character. A token begins where the one before it ends, because some tokenizers
    leave out white space. A byte of a character may have an empty place (i, i): it counts as the character."""
    mask, last_end = [], 0
    for begin, end in offsets:
        end = max(last_end, begin + 1, end)
        mask.append(int(1 in trained[min(last_end, end - 1) : end]))
        last_end = end
    return mask
