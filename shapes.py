"""The shapes of models: `ModelConfig`, and MODELS, the known models by name. model.py builds a `Transformer` from one.

Nothing here imports torch: the command line looks shapes up before torch is loaded, which takes seconds."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; kind: Hugging Face's rope_type. "llama3": Llama 3.1's, of the slow ones
    (arXiv 2407.21783 section 3)."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192
    kind: str = "llama3"

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    ffn_dim: int
    max_seq_len: int
    n_kv_heads: int = 0  # 0: as many as heads
    head_dim: int = 0  # 0: dim / n_heads
    norm: str = "rmsnorm"  # rmsnorm | layernorm
    positions: str = "rope"  # rope | learned
    mlp: str = "swiglu"  # swiglu | gelu | moe (swiglu experts)
    bias: bool = False  # of every projection
    qkv_bias: bool = False  # of queries, keys and values alone
    qk_norm: bool = False  # each head's queries and keys are normalised before RoPE
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    n_experts: int = 0
    top_k: int = 0
    router_aux_loss_coef: float = 0.0  # what load balancing of experts adds to the mean loss; see Transformer.balance
    init_std: float = 0.02
    family: str = ""  # Hugging Face's model_type if the other fields do not determine it: mistral

    @property
    def chat_format(self) -> str:
        """The chat format if neither the tokenizer nor its folder has one: "llama" or "mixtral"."""
        return "mixtral" if self.n_experts or self.family == "mistral" else "llama"

    def __post_init__(self):
        for field, value in (("n_kv_heads", self.n_heads), ("head_dim", self.dim // max(self.n_heads, 1))):
            if not getattr(self, field):
                object.__setattr__(self, field, value)
        for field in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} does not divide by n_kv_heads {self.n_kv_heads}")
        if self.dim % self.n_heads and self.head_dim == self.dim // self.n_heads:
            raise ValueError(f"dim {self.dim} does not divide by n_heads {self.n_heads}")
        if self.top_k > self.n_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.n_experts} experts")
        rows = [self.vocab_size, 2 * self.ffn_dim, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim]
        rows += [self.max_seq_len] * (self.positions == "learned")
        if max(rows) * self.dim * max(self.n_experts, 1) >= 2**50 or max(self.n_layers, self.n_experts) > 10_000:
            raise ValueError(
                f"no machine holds it: {self.n_layers} layers, {self.n_experts} experts, matrices of {max(rows)} x"
                f" {self.dim}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim} (dim / n_heads)")


def _gpt2(dim: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(vocab_size=50257, dim=dim, n_layers=n_layers, n_heads=n_heads, ffn_dim=4 * dim, max_seq_len=1024,
                       norm="layernorm", positions="learned", mlp="gelu", bias=True, tied=True)  # fmt: skip


_LLAMA2 = ModelConfig(vocab_size=32000, dim=4096, n_layers=32, n_heads=32, ffn_dim=11008, max_seq_len=4096)
_LLAMA3 = ModelConfig(
    vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, max_seq_len=8192, rope_theta=5e5
)
_LLAMA3_70B = replace(_LLAMA3, dim=8192, n_layers=80, n_heads=64, ffn_dim=28672, head_dim=128)
_LLAMA31 = dict(max_seq_len=131072, rope_scaling=RopeScaling(factor=8.0))
_LLAMA32 = dict(max_seq_len=131072, rope_scaling=RopeScaling(factor=32.0), tied=True)
_MIXTRAL = replace(
    _LLAMA2, n_kv_heads=8, ffn_dim=14336, max_seq_len=32768, mlp="moe", n_experts=8, top_k=2, rope_theta=1e6,
    router_aux_loss_coef=0.02,
)  # fmt: skip
_QWEN = replace(_LLAMA2, vocab_size=151936, max_seq_len=32768, rope_theta=1e6, norm_eps=1e-6)
_QWEN25 = replace(_QWEN, qkv_bias=True)
_QWEN3 = replace(_QWEN, qk_norm=True, n_kv_heads=8, head_dim=128, max_seq_len=40960)
_TINY = ModelConfig(  # the narrower, the larger its init_std: close to 0.6 / sqrt(dim), as 0.02 is at a width of 1024
    vocab_size=258, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=176, max_seq_len=2048, rope_theta=5e5,
    init_std=0.05,
)  # fmt: skip

# The numbers come from each model's config.json on the hub (openai-community, meta-llama, mistralai, Qwen). tiny-* are
# made for tests. mistral-7b is version 0.3: version 0.1 has a sliding window.
MODELS: dict[str, ModelConfig] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "llama2-7b": _LLAMA2,
    "llama2-13b": replace(_LLAMA2, dim=5120, n_layers=40, n_heads=40, n_kv_heads=0, ffn_dim=13824),
    "llama2-70b": replace(_LLAMA2, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672, head_dim=128),
    "llama3-8b": _LLAMA3,
    "llama3-70b": _LLAMA3_70B,
    "llama3.1-8b": replace(_LLAMA3, **_LLAMA31),
    "llama3.1-70b": replace(_LLAMA3_70B, **_LLAMA31),
    "llama3.1-405b": replace(_LLAMA3, dim=16384, n_layers=126, n_heads=128, ffn_dim=53248, head_dim=128, **_LLAMA31),
    "llama3.2-1b": replace(_LLAMA3, dim=2048, n_layers=16, n_heads=32, ffn_dim=8192, head_dim=64, **_LLAMA32),
    "llama3.2-3b": replace(_LLAMA3, dim=3072, n_layers=28, n_heads=24, ffn_dim=8192, head_dim=128, **_LLAMA32),
    "mixtral-8x7b": _MIXTRAL,
    "mixtral-8x22b": replace(
        _MIXTRAL, dim=6144, n_layers=56, n_heads=48, ffn_dim=16384, max_seq_len=65536, router_aux_loss_coef=0.001
    ),
    "mistral-7b": replace(
        _LLAMA2, vocab_size=32768, n_kv_heads=8, ffn_dim=14336, max_seq_len=32768, rope_theta=1e6, family="mistral"
    ),
    "qwen2.5-0.5b": replace(
        _QWEN25, dim=896, n_layers=24, n_heads=14, n_kv_heads=2, head_dim=64, ffn_dim=4864, tied=True
    ),
    "qwen2.5-1.5b": replace(
        _QWEN25, dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, ffn_dim=8960, max_seq_len=131072, tied=True
    ),
    "qwen2.5-7b": replace(
        _QWEN25, vocab_size=152064, dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944, max_seq_len=131072
    ),
    "qwen3-0.6b": replace(_QWEN3, dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tied=True),
    "qwen3-4b": replace(_QWEN3, dim=2560, n_layers=36, ffn_dim=9728, tied=True),
    "qwen3-8b": replace(_QWEN3, n_layers=36, ffn_dim=12288),
    "tiny-gpt2": replace(_gpt2(64, 2, 4), vocab_size=258, max_seq_len=256),
    "tiny-llama": _TINY,
    "tiny-llama3.2": replace(_TINY, rope_scaling=RopeScaling(factor=32.0, original_seq_len=64), tied=True),
    "tiny-qwen2.5": replace(_TINY, qkv_bias=True, tied=True),
    "tiny-qwen3": replace(_TINY, qk_norm=True, head_dim=32),
    "tiny-mixtral": replace(_TINY, mlp="moe", n_experts=4, top_k=2, router_aux_loss_coef=0.02),
}
