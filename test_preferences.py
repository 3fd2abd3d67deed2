"""preferences.py against formulas on whole logits, one process, an uninterrupted run and TRL, if it is installed."""

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import data
import train
from base.errors import UserError, exit_status
from base.ranks import ALONE
from config import parse_args
from data import Batch, make_loader
from dataset.test_prepare import refused
from hf.chat import find_pair
from hf.tokenizer import load_tokenizer
from hf.weights import export_model
from inputs import settled_args
from model import IGNORE, MODELS, Transformer
from preferences import make_objective, pair_loss
from test_shard import fill, skip_plots
from test_train import records, train_in_turn

KINDS = {
    "sigmoid": parse_args(["--dpo=sigmoid"]),
    "smoothed": parse_args(["--dpo=sigmoid", "--dpo_beta=0.3", "--label_smoothing=0.2", "--dpo_sft=0.7"]),
    "sigmoid_norm": parse_args(["--dpo=sigmoid_norm", "--dpo_beta=5"]),
    "ipo": parse_args(["--dpo=ipo"]),
    "simpo": parse_args(["--dpo=simpo", "--dpo_beta=2"]),
}
LENGTHS = [((7, 5), (7, 9)), ((4, 11), (4, 2)), ((3, 3), (3, 4))]  # (prompt, answer) of chosen and rejected


def make_pairs(vocab_size: int) -> list[list[tuple[torch.Tensor, int]]]:
    """[(ids, length of the prompt)] of both answers of each pair."""
    generator = torch.Generator().manual_seed(1)
    return [[(torch.randint(vocab_size, (p + n,), generator=generator), p) for p, n in pair] for pair in LENGTHS]


def pack(pairs, reference=None, T: int = 56) -> Batch:
    """One row with these pairs."""
    tokens, targets = torch.zeros(1, T, dtype=torch.int64), torch.full((1, T), IGNORE)
    positions, at = torch.arange(T)[None].clone(), 0
    for ids, prompt in (document for pair in pairs for document in pair):
        n = len(ids) - 1
        tokens[0, at : at + n] = ids[:-1]
        targets[0, at + prompt - 1 : at + n] = ids[prompt:]
        positions[0, at : at + n] = torch.arange(n)
        at += n
    positions[0, at:] = torch.arange(T - at)
    return Batch(tokens, targets, positions, pairs=torch.arange(len(pairs))[None], reference=reference)


def logp_of(model, ids, prompt):
    """The oracle: the sum of an answer's log-probabilities, from whole logits."""
    logits = model.logits(ids[None, :-1])[0].double().log_softmax(-1)
    return logits[prompt - 1 :].gather(1, ids[prompt:, None]).sum()


def loss_by_formula(chosen, rejected, n, reference, c):
    s = chosen - reference[0], rejected - reference[1]
    if c.dpo == "sigmoid":
        m = c.dpo_beta * (s[0] - s[1])
        e = c.label_smoothing
        loss = -(1 - e) * torch.sigmoid(m).log() - e * torch.sigmoid(-m).log()
    elif c.dpo == "sigmoid_norm":
        loss = -torch.sigmoid(c.dpo_beta * (s[0] / n[0] - s[1] / n[1])).log()
    elif c.dpo == "ipo":
        loss = (s[0] / n[0] - s[1] / n[1] - 1 / (2 * c.dpo_beta)) ** 2
    else:
        loss = -torch.sigmoid(c.dpo_beta * (chosen / n[0] - rejected / n[1]) - c.simpo_gamma).log()
    return loss - c.dpo_sft * chosen / n[0]


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_packed_pairs_have_the_loss_and_gradients_of_the_formula(config):
    torch.manual_seed(0)
    model = Transformer(MODELS["tiny-llama"])
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.05)
    pairs = make_pairs(model.config.vocab_size)
    reference = torch.tensor([[[-20.0, -30.0], [-9.0, -3.0], [-8.0, -9.5]]])
    expected = 0.0
    for pair, ref in zip(pairs, reference[0], strict=True):
        chosen, rejected = (logp_of(model, *answer) for answer in pair)
        expected += loss_by_formula(chosen, rejected, [len(ids) - p for ids, p in pair], ref.double(), config)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    batch = pack(pairs, reference)
    loss, details = train.forward(model, batch, functools.partial(pair_loss, config))
    loss.backward()
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        scale = gradients[name].abs().max()
        torch.testing.assert_close(p.grad, gradients[name], rtol=0, atol=2e-6 * scale.item() + 1e-9, msg=name)
    assert details.figures.shape == (6,)


# ---- runs

GOOD, BAD = ["kind", "helpful", "clear", "warm"], ["rude", "vague", "cold", "loud"]
FAST = "--model tiny-llama --tokenizer bytes --dtype fp32 --compile none --seq_len 192 --dpo sigmoid --lr 1e-3"
FAST += " --schedule constant --warmup_steps 0 --eval_batches 1 --log_every 1"


def conversation(number: int, answer: str) -> list[dict]:
    return [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def pairs_file(tmp_path_factory):
    """60 pairs; the chosen answers have other words than the rejected ones."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = []
    for i in range(60):
        chosen, rejected = (" ".join(words[(i * k) % 4] for k in range(1, 2 + i % 3)) for words in (GOOD, BAD))
        lines.append({"chosen": conversation(i, chosen), "rejected": conversation(i, rejected)})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(autouse=True)
def without_plots(monkeypatch):
    skip_plots(monkeypatch.setattr)


def run_of(out: Path, pairs: Path, *flags) -> dict[int, dict]:
    """A run in this process -> its records by step."""
    assert train.main([*FAST.split(), "--data", str(pairs), "--out", str(out), *map(str, flags)]) == 0
    return {record["step"]: record for record in records(out)}


def test_pairs_are_learnt_and_held_out_pairs_too(tmp_path, pairs_file):
    run = run_of(tmp_path / "run", pairs_file, "--micro_batch=4", "--steps=30", "--eval_every=30")
    assert run[1]["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert run[1]["reward_margin"] == run[1]["reward_accuracy"] == run[1]["rewards_chosen"] == 0.0
    assert run[30]["reward_accuracy"] > 0.95 and run[30]["val_reward_margin"] > 0
    assert run[30]["loss"] < 0.3


WAYS = {
    "adapters": ("--lora=4", "--weights"),
    "nf4": ("--lora=4", "--quantize=nf4", "--weights"),
    "fp8": ("--fp8=tensor",),
    "checkpointing": ("--checkpointing=block",),
    "bf16": ("--dtype=bf16",),
    "ipo": ("--dpo=ipo",),
    "sigmoid_norm": ("--dpo=sigmoid_norm", "--dpo_beta=5"),
}


@pytest.mark.parametrize("flags", WAYS.values(), ids=WAYS)
def test_the_first_step_is_the_reference(tmp_path, pairs_file, flags):
    """Its rewards are exactly 0, whatever computes them."""
    more = [*flags]
    if "--weights" in more:
        model = fill(Transformer(replace(MODELS["tiny-llama"], ffn_dim=192)))  # blocks of NF4 divide it
        export_model(model, tmp_path / "base")
        more += [str(tmp_path / "base"), "--model", str(tmp_path / "base")]
    run = run_of(tmp_path / "run", pairs_file, "--micro_batch=4", "--steps=2", *more)
    loss = {"ipo": 25.0}.get(more[0].partition("=")[2], math.log(2))
    assert run[1]["loss"] == pytest.approx(loss, rel=1e-6)
    assert run[1]["rewards_chosen"] == run[1]["rewards_rejected"] == 0.0
    assert run[2]["reward_margin"] != 0.0


def test_simpo_has_no_reference():
    config = KINDS["simpo"]
    assert make_objective(config, SimpleNamespace(ranks=ALONE), *[None] * 5).args == (config,)


NAMES = "loss", "grad_norm", "reward_margin", "logp_rejected"


def test_a_resume_is_exact_and_refuses_a_lost_reference(tmp_path, pairs_file, capsys):
    """Also one without evaluation, and one of another run's checkpoint."""
    out, flags = tmp_path / "run", ("--micro_batch=4", "--save_every=3", "--val_data", str(pairs_file))
    first, last = out / "checkpoints" / "step-00000003", out / "checkpoints" / "step-00000005"
    expected = run_of(out, pairs_file, *flags, "--eval_every=4", "--steps=5")
    shutil.rmtree(last)
    words = [*FAST.split(), "--data", str(pairs_file), "--out", str(out), *flags]
    for more, message in (
        (["--steps=9"], "has only the pairs of the first 5 steps"),
        (["--steps=5", "--eval_every=4", "--eval_batches=5"], "lacks pairs that --eval_batches adds"),
    ):
        assert exit_status(train.main, [*words, *more]) == 2
        output = "".join(capsys.readouterr())
        assert message in output and "Training from step 4" not in output
    branch = run_of(tmp_path / "branch", pairs_file, *flags, "--steps=5", f"--resume={first}")
    for resumed in run_of(out, pairs_file, *flags, "--eval_every=0", "--steps=5"), branch:
        for step in (4, 5):
            assert [resumed[step][name] for name in NAMES] == [expected[step][name] for name in NAMES], step
    shutil.rmtree(last)
    reference = out / "reference.npz"
    reference.write_bytes(reference.read_bytes()[:-30])
    for _ in range(2):  # damaged, then lost
        assert exit_status(train.main, [*words, "--steps=5"]) == 2
        assert "reference.npz cannot be read" in capsys.readouterr().err
        reference.unlink(missing_ok=True)


@pytest.mark.parametrize("changed", ["data", "template"])
def test_a_resume_with_other_pairs_or_another_rendering_is_refused(tmp_path, pairs_file, changed):
    data, base = tmp_path / "data.jsonl", tmp_path / "base"
    shutil.copyfile(pairs_file, data)
    export_model(fill(Transformer(MODELS["tiny-llama"])), base, tokenizer=load_tokenizer("bytes"), chat_format="llama")
    words = [*FAST.split(), "--data", str(data), "--tokenizer", str(base)]
    state = make_loader(settled_args(words)).state_dict()
    changes = {"data": (data, "Say 7", "Say 8"), "template": (base / "chat_template.jinja", "[INST]", "[TELL]")}
    path, old, new = changes[changed]
    path.write_text(path.read_text().replace(old, new))
    load_tokenizer.cache_clear()  # as in another process
    assert "was trained on other data" in refused(make_loader(settled_args(words)).load_state_dict, state)


def test_the_reference_of_an_adapter_is_where_it_starts(tmp_path, pairs_file):
    """Continued and merged weights have the same log-probabilities, which are not the base's."""
    base, flags = tmp_path / "base", ("--micro_batch=4", "--eval_every=0")
    export_model(fill(Transformer(MODELS["tiny-llama"])), base, tokenizer=load_tokenizer("bytes"), chat_format="llama")
    on_base = "--weights", base, "--lora=4"
    start = run_of(tmp_path / "first", pairs_file, *flags, *on_base, "--steps=3")
    adapter, merged = tmp_path / "first" / "adapter", tmp_path / "first" / "hf"
    continued = run_of(tmp_path / "second", pairs_file, *flags, *on_base, f"--lora_weights={adapter}", "--steps=2")
    whole = run_of(tmp_path / "third", pairs_file, *flags, f"--weights={merged}", "--steps=1")
    assert continued[1]["reward_margin"] == continued[1]["rewards_chosen"] == 0.0 != continued[2]["reward_margin"]
    assert continued[1]["logp_chosen"] == pytest.approx(whole[1]["logp_chosen"], rel=1e-5)
    assert abs(continued[1]["logp_chosen"] - start[1]["logp_chosen"]) > 0.1


def test_ranks_meshes_and_micro_batches_do_not_change_the_losses(tmp_path, pairs_file):
    """One process with one micro-batch of 8 rows is the oracle. The last step does not divide by the ranks."""
    alone = run_of(tmp_path / "alone", pairs_file, "--micro_batch=8", "--steps=3", "--eval_every=3")
    single = run_of(tmp_path / "single", pairs_file, "--micro_batch=1", "--batch_tokens=1536", "--steps=3")
    flags = [*FAST.split(), "--data", pairs_file, "--micro_batch=2", "--batch_tokens=1536", "--eval_every=3"]
    train_in_turn(
        [*flags, "--steps=3", "--out", tmp_path / "fsdp"],
        [*flags, "--steps=3", "--shard_size=1", "--out", tmp_path / "ddp"],
        [*flags, "--steps=3", "--save_every=2", "--out", tmp_path / "resumed"],
    )
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step-00000003")
    resumed = run_of(tmp_path / "resumed", pairs_file, "--micro_batch=2", "--batch_tokens=1536", "--steps=3")
    others = [single, resumed] + [{r["step"]: r for r in records(tmp_path / name)} for name in ("fsdp", "ddp")]
    for other in others:
        for step in (1, 2, 3):
            for name in ("loss", "grad_norm", "reward_margin", "reward_accuracy", "logp_chosen"):
                assert other[step][name] == pytest.approx(alone[step][name], rel=2e-5, abs=2e-6), (step, name)


# ---- rows in the wild

U, C = {"role": "user", "content": "Q?"}, {"role": "assistant", "content": "yes"}
R = C | {"content": "no"}
ROWS = [
    {"prompt": "Q?", "chosen": "yes", "rejected": "no"}, {"prompt": [U], "chosen": [C], "rejected": [R]},
    {"chosen": [U, C], "rejected": [U, R]}, {"prompt": "Q?", "chosen": [U, C], "rejected": [U, R]},
    {"prompt": "Q?", "chosen": [U, C], "rejected": [U, R], "messages": [U, C]},
    {"instruction": "Q?", "input": "", "chosen": "yes", "rejected": "no"},
    {"question": "Q?", "chosen": "yes", "rejected": "no"},
    {"conversations": [{"from": "human", "value": "Q?"}], "chosen": {"from": "gpt", "value": "yes"},
     "rejected": {"from": "gpt", "value": "no"}},
    {"input": {"messages": [U]}, "preferred_output": [C], "non_preferred_output": [R]},
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_all_forms_are_the_same_pair(row):
    chosen, rejected = find_pair(row, ())
    assert chosen[0] == [U, C] and rejected[0] == [U, R]


def test_a_system_prompt_and_earlier_answers_are_not_trained():
    row = {"system": "S", "question": "Q?", "chosen": "yes", "rejected": "no"}
    assert find_pair(row, ())[0][0][0] == {"role": "system", "content": "S"}
    earlier = {"chosen": [U, C, U, C], "rejected": [U, C, U, R]}
    assert [message.get("weight") for message in find_pair(earlier, ())[1][0]] == [None, 0, None, None]
    with pytest.raises(UserError, match="differ before their last answer"):
        find_pair(earlier | {"rejected": [U, R, U, R]}, ())


def test_pairs_that_say_nothing_or_do_not_fit_are_dropped_and_counted(tmp_path, caplog):
    rows = [{"prompt": f"Q{i}", "chosen": "yes " * (1 + i), "rejected": "no"} for i in range(9)]
    rows += [{"prompt": "Q", "chosen": "same", "rejected": "same "}, {"prompt": "Q", "chosen": " ", "rejected": "no"}]
    rows.insert(0, {"prompt": "Q", "chosen": "long " * 100, "rejected": "no"})
    path, out = tmp_path / "pairs.jsonl", str(tmp_path / "out")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("WARNING"):
        (source,) = make_loader(settled_args([*FAST.split(), "--data", str(path), "--val_data", str(path)])).sources
    answers = sum(len(f" {row[name].strip()} ") + 1 for row in rows[:10] for name in ("chosen", "rejected"))  # and EOS
    note = f"10 pairs with {answers} tokens of answers, 0 truncated to --seq_len 192 and 1 dropped; --seq_len 539 keeps"
    assert source.pair_count == 9 and source.note.startswith(note)
    for what in ("a pair of equal answers", "a pair with an empty answer"):
        assert f"{what} is dropped: 1 row" in caplog.text
    data.main(["prepare", "--data", str(path), "--tokenizer", "bytes", "--dpo", "sigmoid", "--out", out])
    prepared = [make_loader(settled_args([*FAST.split(), "--data", out]), split=split) for split in ("train", "val")]
    assert [loader.sources[0].pair_count for loader in prepared] == [8, 1]  # the last pair is held out
    assert "--dpo none: `data.py prepare` takes --dpo" in refused(make_loader, settled_args(["--data", out]))


def test_without_dpo_a_pair_trains_its_chosen_answer_and_the_log_says_so(tmp_path, caplog):
    path, words = tmp_path / "pairs.jsonl", ["--model", "tiny-llama", "--tokenizer", "bytes", "--seq_len", "64"]
    path.write_text('{"prompt": "Q?", "chosen": "yes", "rejected": "no"}\n' * 40)
    with caplog.at_level("WARNING"):
        (source,) = make_loader(settled_args([*words, "--data", str(path)])).sources
    assert source.is_chat and not source.pair_count
    assert "nothing reads the field rejected: 40 rows" in caplog.text


@pytest.mark.parametrize("words, message", [
    ("--dpo simpo", "needs a --dpo_beta"), ("--dpo sigmoid --stream", "neither with --stream"),
    ("--dpo ipo --label_smoothing 0.1", "--label_smoothing has no effect without --dpo sigmoid"),
    ("--dpo sigmoid --context_parallel 2", "nor with --context_parallel"),
    ("--dpo_beta 0.1", "--dpo_beta has no effect without --dpo"),
])  # fmt: skip
def test_flags_that_do_not_fit_are_refused(words, message):
    with pytest.raises(UserError, match=message):
        settled_args(words.split())


# ---- another trainer


@pytest.mark.parametrize("kind, beta", [("sigmoid", 0.1), ("sigmoid_norm", 5.0), ("ipo", 0.1)])
def test_three_steps_are_those_of_trl(tmp_path, pairs_file, kind, beta):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows = [json.loads(line) for line in pairs_file.read_text().splitlines()][:12]
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = fill(Transformer(MODELS["tiny-llama"]))
    export_model(base, tmp_path / "base", tokenizer=load_tokenizer("bytes"), chat_format="llama")
    flags = [f"--dpo={kind}", f"--dpo_beta={beta}", "--weights", tmp_path / "base", "--val_data", few, "--steps=3"]
    flags += ["--seq_len=512", "--beta2=0.999", "--weight_decay=0", "--eval_every=0", "--micro_batch=0"]
    count = make_loader(
        settled_args([*FAST.split(), "--data", str(few), *map(str, flags), "--batch_tokens=512"])
    ).epoch_rows
    ours = run_of(tmp_path / "run", few, *flags, f"--batch_tokens={512 * count}")

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base")
    tokenizer.pad_token = tokenizer.eos_token
    split = [
        {"prompt": row["chosen"][:1], "chosen": row["chosen"][1:], "rejected": row["rejected"][1:]} for row in rows
    ]
    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=len(rows), max_steps=3, learning_rate=1e-3,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", beta=beta, loss_type=[kind], bf16=False, fp16=False, use_cpu=True, report_to="none",
        max_length=None, gradient_checkpointing=False, disable_tqdm=True, logging_nan_inf_filter=False,
    )  # fmt: skip
    trainer = trl.DPOTrainer(model, args=arguments, train_dataset=Dataset.from_list(split), processing_class=tokenizer)
    trainer.train()
    theirs = [row for row in trainer.state.log_history if "loss" in row]
    for step, row in enumerate(theirs, 1):
        assert ours[step]["loss"] == pytest.approx(row["loss"], rel=1e-5, abs=1e-5)
        assert ours[step]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4)
        assert ours[step]["reward_margin"] == pytest.approx(row["rewards/margins"], rel=1e-3, abs=1e-5)
