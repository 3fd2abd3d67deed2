"""Bytes: Python's own UTF-8 is the oracle."""

import random

import pytest

from errors import UserError
from tokenizer import load_tokenizer


@pytest.fixture
def tokenizer():
    return load_tokenizer("bytes")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain <s> </s> <|begin_of_text|> 256",
        "naïve café 日本語 🎈 \U0010ffff",
        "\0\x01\x1f\x7f\x80\x9f line\r\nline\u2028line",
    ],
)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids == list(bytes(text, "utf-8")) and all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == text


def test_random_round_trips(tokenizer):
    r = random.Random(0)
    for _ in range(200):
        codes = [r.choice((r.randrange(128), r.randrange(0xD800), r.randrange(0xE000, 0x110000))) for _ in range(50)]
        text = "".join(map(chr, codes))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte(tokenizer):
    for i in range(256):
        assert tokenizer.decode([i]) == (chr(i) if i < 128 else "\ufffd")
    assert {i for c in map(chr, range(0xD800)) for i in tokenizer.encode(c)} >= set(range(0xC0))


def test_ids(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (256, 257, 258)


def test_control_tokens_are_no_text(tokenizer):
    assert tokenizer.decode([256, 72, 257, 105, 257]) == "Hi"
    assert max(tokenizer.encode("".join(map(chr, range(0x3000))))) < 256


@pytest.mark.parametrize("spec", ["", "Bytes", "gpt2", "no/such/tokenizer.model"])
def test_an_unknown_tokenizer_is_refused(spec):
    with pytest.raises(UserError, match="--tokenizer") as error:
        load_tokenizer(spec)
    assert spec in str(error.value) and "bytes" in str(error.value)
