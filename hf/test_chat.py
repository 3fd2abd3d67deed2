"""hf/chat.py. Oracles: transformers' ids and its masks of templates with `{% generation %}`, and texts written here.

Each template has traits of a published one. Its text is our own, and short."""

import functools
import json
import random
import re
from dataclasses import replace

import pytest
import tokenizers
import torch
import transformers

import train
from base.errors import UserError
from dataset.prepare import ID, TRAINED, Encoder, TextRow, find_files, prepare_folder, tell_omissions
from hf import tokenizer as T
from hf.chat import chat_template, find_messages, render_chat
from hf.test_tokenizer import _gemma, _json, _llama2_json, _write
from hf.tokenizer import decode_marked
from hf.weights import export_model
from model import MODELS, Transformer
from test_model import scramble
from test_shard import skip_plots

HEAD = r"""{%- for m in messages %}{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\n' + m.content
+ '<|im_end|>\n' }}{%- else %}{{- '<|im_start|>assistant\n' }}{%- generation %}"""
CALLS = r"""{%- for c in m.tool_calls or [] %}{{- '\n<call>' + c.function | tojson + '</call>' }}{%- endfor %}"""
TAIL = r"""{{- '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
TOOLS = "{%- if tools %}{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
TRAITS = {
    "plain": HEAD + "{{- m.content }}" + TAIL,
    "calls": TOOLS + HEAD + "{{- m.content }}" + CALLS + TAIL,
    # Qwen3: reasoning is shown behind the last question only; the last answer has a thought, if only an empty one.
    "reasons": TOOLS + r"""{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}""" + HEAD + r"""{%- if loop.index0 > ns.last and (loop.last
or m.reasoning_content) %}{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}
{{- m.content.split('</think>')[-1] }}""" + CALLS + TAIL,
    # R1: the prompt opens a thought, which earlier answers lack; the text of an answer ends with a control token, too.
    "opens": r"""{{- bos_token }}{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>' }}
{%- generation %}{{- m.content.split('</think>')[-1] }}{%- for c in m.tool_calls or [] %}{{- '<|begin_of_text|>'
+ c.function | tojson + '<|begin_of_text|>' }}{%- endfor %}{{- '<|end_of_text|>' }}{%- endgeneration %}{%- else %}
{{- m.role + ': ' + m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}
{{- '<|im_start|><think>\n' }}{%- endif %}""",
    # Nemotron: the prompt opens a thought, and an answer without one closes it at once; earlier thoughts are cut.
    "closes": r"""{%- set ns = namespace(last=0) %}{%- for m in messages %}{%- if m.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}""" + HEAD.replace("{%- generation %}", r"""
{%- set thought = m.reasoning_content + '\n' if m.reasoning_content and loop.index0 > ns.last else '' %}
{{- '<think>\n' if thought else '<think>' }}{%- generation %}{{- thought + '</think>' + m.content }}""") + CALLS
+ TAIL.replace(r"assistant\n", r"assistant\n<think>\n"),
    "words": r"""{{- bos_token }}{%- for m in messages %}{%- if m.role != 'assistant' %}{{- 'U: ' + m.content + '\n' }}
{%- else %}{{- 'A: <think>' }}{%- generation %}{{- '</think>' + m.content + eos_token }}{%- endgeneration %}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- 'A: <think>\n' }}{%- endif %}""",
    "cuts": HEAD + r"{{- m.content.split('[/THINK]')[-1].replace('\t', '') }}" + TAIL,
    # gpt-oss: control tokens within an answer, and another end of the last one.
    "channels": r"""{%- for m in messages %}{{- '<|im_start|>' + m.role }}{%- if m.role == 'assistant' %}
{%- generation %}{%- if loop.last and m.thinking %}{{- '<|begin_of_text|>' + m.thinking + '<|im_end|>' }}{%- endif %}
{{- '<|begin_of_text|>final' + m.content + ('<|end_of_text|>' if loop.last else '<|im_end|>') }}{%- endgeneration %}
{%- else %}{{- '<|begin_of_text|>' + m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}
{{- '<|im_start|>assistant' }}{%- endif %}""",
    # Mistral: system message and tools are in the last question; no prompt; a tool's answer needs a call.
    "moves": r"""{{- bos_token }}{%- set ns = namespace(last=0, calls=0, before='') %}{%- for m in messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}
{%- if m.role == 'system' %}{%- set ns.before = m.content + '\n\n' %}{%- elif m.role == 'user' %}{%- set ns.calls = 0 %}
{%- if loop.index0 == ns.last and tools %}{{- '[TOOLS]' + tools | tojson }}{%- endif %}{{- '[INST] '
+ (ns.before if loop.index0 == ns.last else '') + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}
{%- if not ns.calls %}{{- raise_exception('no call') }}{%- endif %}{{- '[RESULT]' + m.content }}{%- else %}
{%- set ns.calls = m.tool_calls %}{%- generation %}{{- ' ' + m.content }}{%- for c in m.tool_calls or [] %}
{{- '[CALL]' + c.function | tojson }}{%- endfor %}{{- eos_token }}{%- endgeneration %}{%- endif %}{%- endfor %}""",
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "naïve <|im_end|>"}}}
GENERATION = r"\{%-? (end)?generation %\}"
ADD = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def _tokenizer(folder, template: str, merges: bool = True, **files):
    """-> ours, transformers', of ChatML's control tokens. Without merges every token is a byte."""
    d = _json("qwen")
    if not merges:
        d["model"]["merges"] = []
    config = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | files.pop("config", {})
    files = {"tokenizer__json": d, "tokenizer_config__json": config, "config__json": {}} | files
    spec = _write(folder, **files, **({"chat_template__jinja": template.encode()} if template else {}))
    return T.load_tokenizer(spec), transformers.AutoTokenizer.from_pretrained(spec)


def _conversations(seed: int, tools: bool, reasons: bool, system: bool):
    """Conversations of up to four turns, with answers that call tools. The last one thinks: of earlier ones, templates
    leave the thoughts out."""
    r, texts = random.Random(seed), ["One.", "\n\nIt is  so.", "naïve 日本語 🎈", "  x\n", "assistant", "<think>", "0"]
    for turns in range(1, 5):
        messages = [{"role": "system", "content": r.choice(texts)}] * system
        for turn in range(turns):
            messages.append({"role": "user", "content": r.choice(texts)})
            for _ in range(r.randrange(3) if tools else 0):
                calls = [CALL] * r.randrange(1, 3)
                messages.append({"role": "assistant", "content": r.choice(texts), "tool_calls": calls})
                messages.append({"role": "tool", "content": r.choice(texts)})
            thought = r.choice((None, "so\nand so")) if reasons and turn == turns - 1 else None
            messages.append({"role": "assistant", "content": r.choice(texts), "reasoning_content": thought})
        yield messages
        yield messages[: 1 + system]  # a question only


@pytest.mark.parametrize("merges", [True, False])
@pytest.mark.parametrize("name", TRAITS)
def test_ids_and_masks_are_those_of_transformers(name, merges, tmp_path):
    """Their mask needs the generation blocks of the template; ours is the same with and without them."""
    ours, theirs = _tokenizer(tmp_path, TRAITS[name], merges)
    bare = re.sub(GENERATION, "", TRAITS[name])
    has_tools, reasons = name in ("calls", "reasons", "opens", "moves"), name in ("reasons", "closes", "channels")
    for seed, system in [(seed, system) for seed in range(2) for system in (False, True)]:
        for messages in _conversations(seed, has_tools, reasons, system):
            if not merges or "<|im_end|>" in str(messages):  # transformers reads it in a message as a control token
                messages = json.loads(json.dumps(messages).replace("<|im_end|>", "end"))
            tools = ADD if "tools" in bare else None
            asks = messages[-1]["role"] != "assistant"
            how = {"add_generation_prompt": asks, "return_dict": True, "return_assistant_tokens_mask": True}
            expected = theirs.apply_chat_template(messages, tools=tools, **how)
            for template in (ours.chat_template, bare):
                ids, mask = render_chat(ours, messages, template, {"tools": tools})
                assert ids == expected["input_ids"], messages
                assert mask == expected["assistant_masks"], decode_marked(ours, ids, mask)


def test_no_text_makes_a_control_token(tmp_path):
    """Of messages, tools and calls, in keys and values."""
    ours, _ = _tokenizer(tmp_path, TRAITS["calls"])
    counts = set()
    for text in ("x", "<|im_end|>"):
        call = {"function": {"name": text, "arguments": {text: [text]}}}
        messages = [{"role": role, "content": text} for role in ("user", "assistant", "tool", "assistant")]
        messages[1]["tool_calls"] = [call]
        ids, mask = render_chat(ours, messages, ours.chat_template, {"tools": [{"name": text}]})
        counts.add(tuple(on for i, on in zip(ids, mask, strict=True) if i == ours.control["<|im_end|>"]))
    assert counts == {(0, 0, 1, 0, 1)}


def test_a_run_on_tool_calls_ends_in_a_folder_that_transformers_continues(tmp_path, monkeypatch):
    """It renders the same ids, answers as in the trained conversation, and stops at the end of each answer, which was
    trained on although it is also the padding. The source's ends and the usual ones are listed."""
    generation = {"eos_token_id": [3, 7], "pad_token_id": 3}
    tokens = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    ours, _ = _tokenizer(tmp_path / "own", TRAITS["calls"], config=tokens, generation_config__json=generation)
    messages = [ASK, ANSWER | {"tool_calls": [SUM]}, RESULT, {"role": "assistant", "content": "It is 2."}]
    (tmp_path / "rows.jsonl").write_text((json.dumps({"messages": messages, "tools": ADD}) + "\n") * 8)
    flags = "--model tiny-llama --seq_len 128 --micro_batch 4 --batch_tokens 512 --steps 40 --lr 5e-3 --compile none"
    flags += f" --dtype fp32 --eval_every 0 --vocab_size {ours.vocab_size} --tokenizer {tmp_path}/own"
    skip_plots(monkeypatch.setattr)
    assert train.main([*flags.split(), "--data", f"{tmp_path}/rows.jsonl", "--out", f"{tmp_path}/run"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run/hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf")
    assert model.generation_config.eos_token_id == [3, 7] == model.config.eos_token_id
    assert ours.eos_id == ours.pad_id == theirs.eos_token_id == 3
    for k in (1, 3):
        how = {"tools": ADD, "return_dict": False}
        prompt = theirs.apply_chat_template(messages[:k], add_generation_prompt=True, **how)
        assert prompt == render_chat(ours, messages[:k], ours.chat_template, {"tools": ADD})[0]
        text = model.generate(torch.tensor([prompt]), max_new_tokens=64)[0].tolist()
        whole = theirs.apply_chat_template(messages[: k + 1], **how)
        assert text == whole[: len(text)] and text[-1] == 3 and len(text) > len(prompt) + 1


def test_bos_is_written_by_the_template_alone(tmp_path):
    """Whatever the tokenizer adds to a text."""
    d = _json("qwen")
    bos = tokenizers.processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)])
    d["post_processor"] = json.loads(bos.__getstate__())
    for count, template in enumerate("{{ bos_token }}" * n + TRAITS["plain"] for n in range(3)):
        ours, theirs = _tokenizer(tmp_path / str(count), template, tokenizer__json=d, config={"add_bos_token": True})
        ids, _ = render_chat(ours, [ASK, ANSWER], ours.chat_template, notes=(notes := []))
        assert ["begins with BOS twice" in note for note, _ in notes] == [True] * (count == 2)
        assert ids == theirs.apply_chat_template([ASK, ANSWER], return_dict=False)
        assert ours.adds_bos and ids.count(ours.bos_id) == count


ASK, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
CALLING = ANSWER | {"tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "abcdefghi"}
THINKS = {"role": "assistant", "content": "So.", "thinking": "hm"}
SUM = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(scope="module")
def tokenizers_of(tmp_path_factory):
    """tokenizers_of(template) -> its folder, our tokenizer, transformers'"""

    @functools.cache
    def make(template):
        folder = tmp_path_factory.mktemp("tokenizer")
        return str(folder), *_tokenizer(folder, template)

    return make


FIELDS = ("sys", "ask", "say")  # of --chat_fields
SYSTEM = {"role": "system", "content": "Be brief."}


def _two(answer="So."):
    return [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": answer}]


# Shapes of rows in public data sets, a template, and the rendered text: [[trained]], « and » for <|im_start|> and
# <|im_end|>, without line feeds.
ONCE, BRIEF = "«userWhy?»«assistant[[So.»]]", "«systemBe brief.»"
ONE_QUESTION = [
    {"messages": [ASK, ANSWER]}, {"messages": json.dumps([ASK, ANSWER])},
    {"messages": [ASK | {"content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}, ANSWER]},
    {"messages": [ASK | {"weight": 0}, ANSWER | {"weight": 1}]},
    {"messages": [ASK | {"weight": None}, ANSWER | {"tool_calls": None}], "system": None, "text": "Why? So."},
    {"conversation": [{"role": "user", "content": "Why?"}, {"role": "bot", "content": "So."}]},
    {"prompt": "Why?", "completion": "So."}, {"prompt": [ASK], "completion": [ANSWER]},
    {"prompt": "Why?", "chosen": [ASK, ANSWER]},
    {"prompt": [ASK], "chosen": [ANSWER]}, {"instruction": "Why?", "input": "", "output": "So."},
    {"ask": "Why?", "say": "So."}, {"ask": "Why?", "say": "So.", "sys": ""},
]  # fmt: skip
ADDS = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
ROWS = [
    *(("plain", row, ONCE) for row in ONE_QUESTION),
    ("plain", {"messages": [SYSTEM, ASK, ANSWER, ASK, ANSWER]}, BRIEF + ONCE + ONCE),
    ("plain", {"messages": [ASK, ANSWER, ASK]}, ONCE + "«userWhy?»«assistant"),
    ("plain", {"messages": [SYSTEM | {"role": "developer"}, ASK, ANSWER]}, "«developerBe brief.»" + ONCE),
    ("plain", {"messages": [ASK, ANSWER | {"weight": 0}, ASK, ANSWER | {"train": True}, ASK, ANSWER | {"loss": False}]},
     "«userWhy?»«assistantSo.»" + ONCE + "«userWhy?»«assistantSo.»"),
    ("plain", {"messages": [ASK | {"trainable": False}, ANSWER]}, ONCE),
    ("plain", {"conversations": [{"from": "system", "value": "Be brief."}, *_two(), *_two()]}, BRIEF + ONCE + ONCE),
    ("plain", {"conversations": _two(), "system": "Be brief."}, BRIEF + ONCE),
    ("plain", {"instruction": "Add.", "input": "1 1", "output": "2"}, "«userAdd.1 1»«assistant[[2»]]"),
    ("plain", {"ask": "Why?", "say": "So.", "sys": "Be brief."}, BRIEF + ONCE),
    ("plain", {"ask": "Why?", "say": "The end <|im_end|> of it."}, "«userWhy?»«assistant[[The end » of it.»]]"),
    ("", {"prompt": "Why?", "completion": "So."}, ONCE),
    ("{% if shout %}!{% endif %}" + TRAITS["plain"],
     {"ask": "Why?", "say": "So.", "chat_template_kwargs": {"shout": True}}, "!" + ONCE),
    ("{{ documents | tojson }}" + TRAITS["plain"], {"ask": "Why?", "say": "So.", "documents": [{"text": "d"}]},
     '[{"text": "d"}]' + ONCE),
    ("calls", {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": json.dumps([{"function": {
        "name": "add", "arguments": '{"a": 1}'}}])}, RESULT, ANSWER], "tools": json.dumps([{"name": "add"}])},
     f'«tools[{{"name": "add"}}]»«userWhy?»«assistant[[{ADDS}»]]«tool2»«assistant[[So.»]]'),
    ("calls", {"conversations": [*_two(answer="<tool_call>"), {"from": "observation", "value": "2"}, *_two()[1:]]},
     "«userWhy?»«assistant[[<tool_call>»]]«tool2»«assistant[[So.»]]"),
    ("calls", {"conversations": [*_two()[:1], {"from": "function_call", "value": json.dumps(SUM["function"])},
                                 {"from": "observation", "value": "2"}, *_two()[1:]]},
     f"«userWhy?»«assistant[[{ADDS}»]]«tool2»«assistant[[So.»]]"),
    ("reasons", {"messages": [ASK, THINKS]}, "«userWhy?»«assistant[[<think>hm</think>So.»]]"),
]  # fmt: skip


def _read(folder, row: dict) -> tuple[list[int], list[int], list]:
    """-> (ids, mask, notes) of a row"""
    tokens, _, notes = Encoder(folder, chat_fields=FIELDS)(TextRow(row))
    return [t & ID for t in tokens], [int(t & TRAINED > 0) for t in tokens], notes


@pytest.mark.parametrize("template, row, marked", ROWS)
def test_rows_are_rendered(template, row, marked, tokenizers_of):
    """With and without generation blocks, of which transformers knows the mask."""
    template = TRAITS.get(template, template)
    folder, ours, theirs = tokenizers_of(template)
    bookkeeping = {"id": 7, "source": "x", "reward_score": 0.5, "empty": None}
    ids, mask, notes = _read(folder, row | bookkeeping)
    text = decode_marked(ours, ids, mask).replace("<|im_start|>", "«").replace("<|im_end|>", "»")
    assert text.replace("\n", "") == marked and not notes
    assert _read(tokenizers_of(re.sub(GENERATION, "", template))[0], row)[:2] == (ids, mask)
    messages, inputs, _ = find_messages(row, FIELDS)
    if template and "<|im_end|>" not in str(messages):  # which transformers reads as a control token
        how = {"add_generation_prompt": messages[-1]["role"] != "assistant", "return_assistant_tokens_mask": True}
        expected = theirs.apply_chat_template(messages, return_dict=True, **how, **inputs)
        assert ids == expected["input_ids"]
        assert mask == expected["assistant_masks"] or any("weight" in message for message in messages)


# Mixtral's: the system message is a part of the first question.
MIXTRAL = r"""{%- set system = messages[0].content if messages[0].role == 'system' else none %}{{- bos_token }}
{%- for m in (messages if system is none else messages[1:]) %}{%- if m.role == 'user' %}{{- ' [INST] '
+ (system + '\n\n' if loop.first and system is not none else '') + m.content + ' [/INST]' }}{%- else %}
{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("kind, model", [
    ("bytes", "tiny-llama"), ("bytes", "tiny-gpt2"), ("gpt2", "tiny-gpt2"), ("llama2", "tiny-llama"),
    ("llama3", "tiny-llama"), ("qwen", "tiny-qwen3"), ("mixtral", "tiny-mixtral"), ("mistral", "tiny-mistral"),
    ("control", "tiny-mistral"), ("gemma", "tiny-gemma3"), ("granite", "tiny-granite"),
])  # fmt: skip
def test_an_export_talks_as_it_was_trained_to(tmp_path, kind, model):
    """Transformers gives the ids of render_chat with the folder's template and tokenizer, and ends with the turn; so do
    we when we read the folder again. gpt2: a tokenizer that has Llama 3's control tokens and cuts otherwise."""
    shape = replace(MODELS["tiny-llama"], family="mistral") if model == "tiny-mistral" else MODELS[model]
    ours = T.load_tokenizer(_gemma(tmp_path / "gemma") if kind == "gemma" else "bytes")
    if kind not in ("bytes", "gemma"):
        pieces = "control" if kind in ("control", "mixtral") else "llama2"
        own = _json(kind) if kind in ("gpt2", "llama3", "qwen", "granite") else None
        own = own or _llama2_json(pieces, tmp_path / "model", kind != "mistral")
        config = {"chat_template": MIXTRAL} if kind == "mixtral" else {}
        ours = T.load_tokenizer(_write(tmp_path / "own", tokenizer__json=own, tokenizer_config__json=config))
    hf, template = tmp_path / "hf", chat_template(ours, shape.chat_format)
    model = scramble(Transformer(replace(shape, vocab_size=ours.vocab_size, n_layers=1)))
    export_model(model, hf, tokenizer=ours, chat_format=shape.chat_format)
    theirs, again = transformers.AutoTokenizer.from_pretrained(hf), T.load_tokenizer(str(hf))
    assert theirs.chat_template == (hf / "chat_template.jinja").read_text()
    for messages in [*_conversations(4, False, False, False), *_conversations(5, False, False, True)]:
        ids, mask = render_chat(ours, messages, template)
        asks = messages[-1]["role"] != "assistant"
        assert theirs.apply_chat_template(messages, return_dict=False, add_generation_prompt=asks) == ids, messages
        assert render_chat(again, messages, chat_template(again, shape.chat_format))[0] == ids
        if not asks:
            last = [i for i, trained in zip(ids, mask, strict=True) if trained][-1]
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((hf / name).read_text())["eos_token_id"]
        assert {ours.eos_id, last} == set(ends if isinstance(ends, list) else [ends])
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


@pytest.mark.parametrize("kind, family, marked", [
    ("bytes", "llama", "<s>[INST] <<SYS>>\nB\n<</SYS>>\n\nU [/INST][[ A </s>]]<s>[INST] V [/INST]"),
    ("bytes", "mixtral", "<s>[INST] B\n\nU [/INST][[ A</s>]][INST] V [/INST]"),
    ("llama3", "llama",
     "<|begin_of_text|>«system»B<|eot_id|>«user»U<|eot_id|>«assistant»[[A<|eot_id|>]]«user»V<|eot_id|>«assistant»"
     .replace("«", "<|start_header_id|>").replace("»", "<|end_header_id|>\n\n")),
    ("qwen", "llama", "<|im_start|>system\nB<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
     "[[A<|im_end|>]]\n<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"),
    ("granite", "llama",
     "«system»B<|end_of_text|>\n«user»U<|end_of_text|>\n«assistant»[[A<|end_of_text|>]]\n«user»V<|end_of_text|>\n"
     "«assistant»".replace("«", "<|start_of_role|>").replace("»", "<|end_of_role|>")),
    ("gemma", "llama", "<bos><start_of_turn>user\nB\n\nU<end_of_turn>\n<start_of_turn>model\n[[A<end_of_turn>]]\n"
     "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n"),
])  # fmt: skip
def test_our_templates_are_the_published_formats_and_train_on_answers(kind, family, marked, tmp_path):
    """As the model cards of Llama 2 and 3 and Mixtral, and the pages on ChatML, Granite and Gemma, print them."""
    make = {"bytes": str, "gemma": lambda _: _gemma(tmp_path)}
    ours = T.load_tokenizer(make.get(kind, lambda kind: _write(tmp_path, tokenizer__json=_json(kind)))(kind))
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "BUAV", strict=True)]
    ids, mask = render_chat(ours, messages, chat_template(ours, family))
    assert decode_marked(ours, ids, mask) == marked


@pytest.mark.parametrize("template, row, message", [
    ("plain", {"messages": [ASK, CALLING]}, "the chat template does not render tool_calls: .*add"),
    ("plain", {"messages": [ASK, ANSWER], "tools": ADD}, "the chat template does not render tools"),
    ("plain", {"messages": [ASK, THINKS]}, "text of the assistant's last answer: 'hm'"),
    ("plain", {"messages": [ASK | {"name": "Ann"}, ANSWER]}, "not render name: 'Ann'"),
    # Its text holds `name`, in `namespace`.
    ("reasons", {"messages": [ASK | {"name": "Ann"}, ANSWER]}, "not render name: 'Ann'"),
    ("{# documents #}" + TRAITS["plain"], {"messages": [ASK, ANSWER], "documents": [{"a": 1}]}, "render documents"),
    ("plain", {"instruction": "a", "input": {"instruction": "b"}, "output": "c"}, "input is .*, expected a str"),
    ("plain", {"messages": [ASK, ANSWER | {"content": [{"type": "thinking", "text": "hm"}]}]}, "message 1: expected a"),
    ("plain", {"messages": [ASK, ANSWER | {"weight": 0.5}]}, "a weight is 0 .*: .*0.5"),
    ("plain", {"messages": [ASK | {"weight": 1}, ANSWER]}, "1 for answers only: .*Why"),
    ("plain", {"messages": [ASK, ANSWER | {"weight": 0}]}, "nothing is trained on"),
    ("calls", {"conversations": [*_two()[:1], {"from": "function_call", "value": "add"}]}, "function_call is 'add'"),
    ("plain", {"messages": [ASK, ANSWER], "loss_mask": [0, 1]}, "does not render loss_mask: .0, 1"),
    ("calls", {"messages": [ASK, ANSWER | {"tool_calls": [{"function": "add"}]}]}, "a tool call is 'add', expected"),
    ("moves", {"messages": [ASK, ANSWER, RESULT, ANSWER]}, "no call"),
    ("cuts", {"messages": [ASK, ANSWER | {"content": "[THINK]a[/THINK]b"}]}, r"last answer: '\[THINK\]a\[/THINK\]b'"),
    ("reasons", {"messages": [ASK, ANSWER | {"content": "<think>a</think>b"}]}, "last answer: '<think>a</think>b'"),
    ("plain", {"messages": []}, "message 0: expected system or developer or user with"),
    ("plain", {"messages": [SYSTEM, ASK, ANSWER, ANSWER]}, "message 3: expected user or tool with"),
    ("plain", {"messages": [ASK, ANSWER, ASK | {"content": " \n"}]}, "message 2: expected user or tool with a text"),
    ("plain", {"messages": [ASK, ANSWER | {"content": [{"type": "text"}]}]}, "message 1: expected assistant with"),
    ("plain", {"messages": [ASK | {"content": "hi \ufdd2there\ufdd3"}]}, "not characters"),
    ("{{ raise_exception('no role') }}", {"messages": [ASK]}, "refuses this conversation: no role"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", {"messages": [ASK, ANSWER]}, "last answer: 'So.'"),
])  # fmt: skip
def test_rows_are_refused(template, row, message, tokenizers_of):
    with pytest.raises(UserError, match=message):
        _read(tokenizers_of(TRAITS.get(template, template))[0], row)


CHANGED = "the chat template changes or leaves out text of the assistant"
CUT = f"{CHANGED}'s earlier answer: it is not trained on"


@pytest.mark.parametrize("template, messages, marked, notes", [
    ("words", [ASK, ANSWER] * 2, "<|begin_of_text|>" + "U: Why?A: <think>[[</think>So.<|end_of_text|>]]" * 2, []),
    ("reasons", [ASK, THINKS, ASK, THINKS],
     "«userWhy?»«assistantSo.»«userWhy?»«assistant[[<think>hm</think>So.»]]", [CUT]),
    ("cuts", [ASK, ANSWER | {"content": "a[/THINK]b"}, ASK, ANSWER], "«userWhy?»«assistantb»" + ONCE, [CUT]),
    ("cuts", [ASK, ANSWER | {"content": "a[/THINK]b"}, ASK], "«userWhy?»«assistantb»«userWhy?»«assistant", [CUT]),
    ("cuts", [ASK, ANSWER | {"content": "a[/THINK]b", "weight": 0}, ASK, ANSWER], "«userWhy?»«assistantb»" + ONCE,
     [CHANGED]),
    ("cuts", [ASK, ANSWER | {"content": "So\t  on."}], "«userWhy?»«assistant[[So  on.»]]", []),
    ("closes", [ASK, THINKS | {"tool_calls": [SUM]}, RESULT, ANSWER, ASK, ANSWER],
     f"«userWhy?»«assistant<think></think>So.{ADDS}»«tool2»«assistant<think>[[</think>So.»]]"
     "«userWhy?»«assistant<think>[[</think>So.»]]", [CUT]),
])  # fmt: skip
def test_answers_that_lose_text_are_not_trained_on(template, messages, marked, notes, tokenizers_of):
    """With and without generation blocks. White space does not count as text."""
    for source in (TRAITS[template], re.sub(GENERATION, "", TRAITS[template])):
        _, ours, _ = tokenizers_of(source)
        ids, mask = render_chat(ours, messages, source, notes=(seen := []))
        text = decode_marked(ours, ids, mask).replace("<|im_start|>", "«").replace("<|im_end|>", "»")
        assert text.replace("\n", "") == marked
        assert [what for what, _ in seen if "assistant" in what] == notes


def test_what_is_left_out_is_counted(tmp_path, caplog):
    """With the first row of each kind."""
    _tokenizer(tmp_path / "t", "{%- set messages = messages[messages[0].role == 'system':] %}" + TRAITS["reasons"])
    rows = [
        {"messages": [ASK, ANSWER]}, {"messages": [SYSTEM, ASK, ANSWER]},
        {"messages": [ASK, THINKS, ASK, ANSWER | {"channel": "c7"}], "system_prompt": "s"},
        {"messages": [ASK, ANSWER], "images": ["a.png"]}, {"messages": [ASK, ANSWER], "images": ["b.png"]},
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = find_files(str(tmp_path / "a.jsonl"), "")
    tell_omissions(prepare_folder(files, Encoder(str(tmp_path / "t")), tmp_path / "out", val_every=0))
    assert {re.sub(r"\S*/a.jsonl: ", "", record.message) for record in caplog.records} == {
        "the chat template changes or leaves out text of the system: 1 row, first in line 2: 'Be brief.'",
        f"{CUT}: 1 row, first in line 3: 'hm'",
        "nothing reads the field channel: 1 row, first in line 3: 'c7'",
        "nothing reads the field system_prompt: 1 row, first in line 3: 's'",
        "nothing reads the field images: 2 rows, first in line 4: \"['a.png']\"",
    }
