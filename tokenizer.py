"""Text <-> token ids. `bytes` is the tokenizer that needs no file: a token is a byte of UTF-8.

Text is always encoded as ordinary text: nothing in a document can become a control token; BOS and EOS are added by id.
"""

from errors import UserError


class ByteTokenizer:
    """256 bytes, then BOS and EOS."""

    bos_id, eos_id, vocab_size = 256, 257, 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        """Control tokens are left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def load_tokenizer(spec: str) -> ByteTokenizer:
    """spec: `bytes`."""
    if spec != "bytes":
        raise UserError(f"--tokenizer {spec}: unknown, the tokenizer there is now is: bytes")
    return ByteTokenizer()
