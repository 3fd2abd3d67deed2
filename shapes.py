"""The shapes of models: `ModelConfig`, and MODELS, the known models by name. model.py builds a `Transformer` from one.

Nothing here imports torch: the command line looks shapes up before torch is loaded, which takes seconds."""

from dataclasses import dataclass

IGNORE = -100  # the target of a token that is not trained on


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched; kind: Hugging Face's rope_type, a name in rope.ROPES. low_freq_factor and
    high_freq_factor are of "llama3"; beta_fast, beta_slow and truncate are of "yarn"."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_seq_len: int = 8192
    kind: str = "llama3"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the first and the last stretched frequency are whole numbers
    attention_factor: float = 1.0  # of cosine and sine; in YaRN's paper 0.1 ln(factor) + 1
    in_windows: bool = True  # whether layers with a window are stretched
    query_growth: float = 0.0  # of queries at position p: times 1 + query_growth ln(1 + floor(p / original_seq_len))

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError("high_freq_factor must be above low_freq_factor")
        if self.original_seq_len % 1:
            raise ValueError(f"original_max_position_embeddings is {self.original_seq_len}, expected a whole number")
        object.__setattr__(self, "original_seq_len", int(self.original_seq_len))  # config.json may have 8192.0


# full: a token sees all tokens before it. window: the nearest ones. nope: queries and keys carry no positions.
KINDS = {"full", "window", "full nope", "window nope"}


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
    norm: str = "rmsnorm"  # rmsnorm | rmsnorm_1p (the factor is 1 + weight) | layernorm
    positions: str = "rope"  # rope | learned
    mlp: str = "swiglu"  # swiglu | geglu | gelu | relu2 | moe (swiglu experts)
    bias: bool = False  # of every projection
    qkv_bias: bool = False  # of queries, keys and values alone
    attention_bias: bool = False  # of queries, keys, values and attention's output
    mlp_bias: bool = False
    qk_norm: bool = False  # each head's queries and keys are normalised before RoPE
    qk_norm_whole: bool = False  # all heads' queries are normalised together, and all heads' keys
    norm_after: bool = False  # attention and MLP are followed by their norms, not preceded
    norm_around: bool = False  # attention and MLP have norms before and after them
    embed_scale: float = 1.0  # embeddings are multiplied by it; 0: the root of dim
    query_scale: float = 0.0  # products of queries and keys are divided by its root; 0: head_dim
    attention_scale: float = 0.0  # products of queries and keys are multiplied by it; 0: query_scale tells
    residual_scale: float = 1.0  # the outputs of attention and MLP are multiplied by it
    logits_divisor: float = 1.0
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    window_rope_theta: float = 0.0  # in layers with a window; 0: rope_theta
    layer_kinds: tuple[str, ...] = ("full",)  # of the first layers; repeated up to n_layers. Names in KINDS
    window: int = 0  # positions that a token sees in a layer with a window, its own included
    n_experts: int = 0
    top_k: int = 0
    norm_top_k: bool = True  # the weights of a token's experts add up to 1
    router_aux_loss_coef: float = 0.0  # what load balancing of experts adds to the mean loss; see Transformer.balance
    init_std: float = 0.02
    family: str = ""  # Hugging Face's model_type if the other fields do not determine it: mistral, ministral,
    # ministral3, phi3

    @property
    def chat_format(self) -> str:
        """The chat format if neither the tokenizer nor its folder has one: "llama" or "mixtral"."""
        is_mistral = self.family in ("mistral", "ministral", "ministral3") or (self.n_experts and not self.qk_norm)
        return "mixtral" if is_mistral else "llama"

    def kind(self, layer: int) -> str:
        """The kind of a layer, as in KINDS."""
        return self.layer_kinds[layer % len(self.layer_kinds)]

    def seen(self, seq_len: int) -> int:
        """Twice the pairs of a token and a position that it sees in a row of T tokens, summed over layers: T^2 for a
        causal layer, 2 W T - W^2 with a window of W positions."""
        width = min(self.window, seq_len)
        windows = sum("window" in self.kind(i) for i in range(self.n_layers))
        return (self.n_layers - windows) * seq_len**2 + windows * width * (2 * seq_len - width)

    def __post_init__(self):
        for field, value in (("n_kv_heads", self.n_heads), ("head_dim", self.dim // max(self.n_heads, 1))):
            if not getattr(self, field):
                object.__setattr__(self, field, value)
        experts = ("n_experts", "top_k") if self.mlp == "moe" else ()
        for field in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "head_dim", *experts):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}, it must be at least 1")
        qkv_dim = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        width = max(self.vocab_size, self.max_seq_len, 2 * self.ffn_dim, qkv_dim)
        huge = width * self.dim * max(self.n_experts, 1) >= 2**50 or max(self.n_layers, self.n_experts) > 10_000
        derived, rotates = self.head_dim == self.dim // self.n_heads, self.positions == "rope"
        for wrong, message in (
            (self.n_heads % self.n_kv_heads, f"n_heads {self.n_heads} does not divide by n_kv_heads {self.n_kv_heads}"),
            (derived and self.dim % self.n_heads, f"dim {self.dim} does not divide by n_heads {self.n_heads}"),
            (rotates and self.head_dim % 2, f"rotary positions need an even head_dim, not {self.head_dim}"),
            (self.top_k > self.n_experts, f"top_k is {self.top_k}, but there are {self.n_experts} experts"),
            (huge, f"no machine holds it: {self.n_layers} layers, matrices of {width} x {self.dim}"),
        ):
            if wrong:
                raise ValueError(message)
        self._shorten_kinds()

    def _shorten_kinds(self) -> None:
        """layer_kinds becomes its shortest form, and window 0 if no layer has one: equal models compare equal."""
        kinds = tuple(self.kind(i) for i in range(self.n_layers))
        has_windows = "window" in " ".join(kinds)
        if not KINDS.issuperset(kinds) or self.window < has_windows:
            raise ValueError(f"layer_kinds is {kinds} and window {self.window}; the kinds are {sorted(KINDS)}")
        period = next(n for n in range(1, self.n_layers + 1) if kinds[n:] == kinds[:-n])
        object.__setattr__(self, "layer_kinds", kinds[:period])
        object.__setattr__(self, "window", self.window * has_windows)


# What the models of a family share. The numbers come from each model's config.json on the hub (openai-community,
# meta-llama, mistralai, Qwen, allenai, HuggingFaceTB, microsoft, google).
GPT2 = {
    "vocab_size": 50257,
    "max_seq_len": 1024,
    "norm": "layernorm",
    "positions": "learned",
    "mlp": "gelu",
    "bias": True,
    "tied": True,
}
LLAMA2 = {
    "vocab_size": 32000,
    "dim": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "ffn_dim": 11008,
    "max_seq_len": 4096,
}
LLAMA3 = LLAMA2 | {
    "vocab_size": 128256,
    "n_kv_heads": 8,
    "ffn_dim": 14336,
    "max_seq_len": 8192,
    "rope_theta": 5e5,
}
LLAMA3_70B = LLAMA3 | {
    "dim": 8192,
    "n_layers": 80,
    "n_heads": 64,
    "ffn_dim": 28672,
}
LLAMA31 = {
    "max_seq_len": 131072,
    "rope_scaling": RopeScaling(factor=8.0),
}
LLAMA32 = LLAMA3 | {
    "max_seq_len": 131072,
    "rope_scaling": RopeScaling(factor=32.0),
    "tied": True,
    "ffn_dim": 8192,
}
MISTRAL = LLAMA2 | {
    "n_kv_heads": 8,
    "ffn_dim": 14336,
    "max_seq_len": 32768,
    "family": "mistral",
}
MINISTRAL3 = MISTRAL | {
    "vocab_size": 131072,
    "head_dim": 128,
    "max_seq_len": 262144,
    "n_layers": 34,
    "rope_theta": 1e6,
    "rope_scaling": RopeScaling(kind="yarn", factor=16.0, original_seq_len=16384, query_growth=0.1),
    "family": "ministral3",
}
MIXTRAL = LLAMA2 | {
    "n_kv_heads": 8,
    "ffn_dim": 14336,
    "max_seq_len": 32768,
    "mlp": "moe",
    "n_experts": 8,
    "top_k": 2,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
}
QWEN = LLAMA2 | {
    "vocab_size": 151936,
    "max_seq_len": 32768,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}
QWEN25 = QWEN | {
    "qkv_bias": True,
    "tied": True,
    "max_seq_len": 131072,
}
QWEN3 = QWEN | {
    "qk_norm": True,
    "n_kv_heads": 8,
    "head_dim": 128,
    "max_seq_len": 40960,
}
OLMO2 = LLAMA2 | {
    "vocab_size": 100352,
    "rope_theta": 5e5,
    "norm_eps": 1e-6,
    "qk_norm_whole": True,
    "norm_after": True,
}
GEMMA3 = {
    "vocab_size": 262208,
    "max_seq_len": 131072,
    "head_dim": 256,
    "norm": "rmsnorm_1p",
    "mlp": "geglu",
    "qk_norm": True,
    "norm_around": True,
    "embed_scale": 0.0,
    "query_scale": 256.0,
    "tied": True,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "window_rope_theta": 1e4,
    "rope_scaling": RopeScaling(kind="linear", factor=8.0, in_windows=False),
    "layer_kinds": (*["window"] * 5, "full"),
    "window": 1024,
}
GEMMA3_1B = GEMMA3 | {
    "vocab_size": 262144,
    "max_seq_len": 32768,
    "rope_scaling": None,
    "window": 512,
    "n_heads": 4,
    "n_kv_heads": 1,
}
TINY = {
    "vocab_size": 258,
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "ffn_dim": 176,
    "max_seq_len": 2048,
    "rope_theta": 5e5,
    "init_std": 0.05,  # the narrower, the larger: close to 0.6 / sqrt(dim), as 0.02 is at a width of 1024
}

# tiny-* are made for tests. mistral-7b is version 0.3, which has no window.
MODELS: dict[str, ModelConfig] = {
    "gpt2": ModelConfig(**GPT2, dim=768, n_layers=12, n_heads=12, ffn_dim=3072),
    "gpt2-medium": ModelConfig(**GPT2, dim=1024, n_layers=24, n_heads=16, ffn_dim=4096),
    "gpt2-large": ModelConfig(**GPT2, dim=1280, n_layers=36, n_heads=20, ffn_dim=5120),
    "gpt2-xl": ModelConfig(**GPT2, dim=1600, n_layers=48, n_heads=25, ffn_dim=6400),
    "llama2-7b": ModelConfig(**LLAMA2),
    "llama2-13b": ModelConfig(**LLAMA2 | dict(dim=5120, n_layers=40, n_heads=40, ffn_dim=13824)),
    "llama2-70b": ModelConfig(**LLAMA3_70B | dict(vocab_size=32000, max_seq_len=4096, rope_theta=10000.0)),
    "llama3-8b": ModelConfig(**LLAMA3),
    "llama3-70b": ModelConfig(**LLAMA3_70B),
    "llama3.1-8b": ModelConfig(**LLAMA3 | LLAMA31),
    "llama3.1-70b": ModelConfig(**LLAMA3_70B | LLAMA31),
    "llama3.1-405b": ModelConfig(**LLAMA3 | LLAMA31 | dict(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248)),
    "llama3.2-1b": ModelConfig(**LLAMA32 | dict(dim=2048, n_layers=16)),
    "llama3.2-3b": ModelConfig(**LLAMA32 | dict(dim=3072, n_layers=28, n_heads=24)),
    "mixtral-8x7b": ModelConfig(**MIXTRAL),
    "mixtral-8x22b": ModelConfig(
        **MIXTRAL
        | dict(dim=6144, n_layers=56, n_heads=48, ffn_dim=16384, max_seq_len=65536, router_aux_loss_coef=0.001)
    ),
    "mistral-7b": ModelConfig(**MISTRAL | dict(vocab_size=32768, rope_theta=1e6)),
    "mistral-7b-v0.1": ModelConfig(**MISTRAL, window=4096, layer_kinds=("window",)),
    "ministral3-8b": ModelConfig(**MINISTRAL3),
    "qwen2.5-0.5b": ModelConfig(
        **QWEN25 | dict(dim=896, n_layers=24, n_heads=14, n_kv_heads=2, ffn_dim=4864, max_seq_len=32768)
    ),
    "qwen2.5-1.5b": ModelConfig(**QWEN25 | dict(dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, ffn_dim=8960)),
    "qwen2.5-7b": ModelConfig(
        **QWEN25 | dict(vocab_size=152064, dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18944, tied=False)
    ),
    "qwen3-0.6b": ModelConfig(**QWEN3 | dict(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tied=True)),
    "qwen3-4b": ModelConfig(**QWEN3 | dict(dim=2560, n_layers=36, ffn_dim=9728, tied=True)),
    "qwen3-8b": ModelConfig(**QWEN3 | dict(n_layers=36, ffn_dim=12288)),
    "qwen3-30b-a3b": ModelConfig(
        **QWEN3 | dict(dim=2048, n_layers=48, n_kv_heads=4, ffn_dim=768),
        mlp="moe",
        n_experts=128,
        top_k=8,
        router_aux_loss_coef=0.001,
    ),
    "olmo2-1b": ModelConfig(**OLMO2 | dict(dim=2048, n_layers=16, n_heads=16, ffn_dim=8192)),
    "olmo2-7b": ModelConfig(**OLMO2),
    "olmo3-7b": ModelConfig(
        **OLMO2 | dict(vocab_size=100278, max_seq_len=65536),
        window=4096,
        layer_kinds=("window", "window", "window", "full"),
        rope_scaling=RopeScaling(kind="yarn", factor=8.0, attention_factor=1.2079441541679836, in_windows=False),
    ),
    "smollm3-3b": ModelConfig(
        **LLAMA3
        | dict(dim=2048, n_layers=36, n_heads=16, n_kv_heads=4, ffn_dim=11008, max_seq_len=65536, rope_theta=5e6),
        norm_eps=1e-6,
        tied=True,
        layer_kinds=("full", "full", "full", "full nope"),
    ),
    "phi-4": ModelConfig(
        **LLAMA2 | dict(vocab_size=100352, dim=5120, n_layers=40, n_heads=40, ffn_dim=17920, max_seq_len=16384),
        n_kv_heads=10,
        rope_theta=250000.0,
        family="phi3",
    ),
    "granite3.3-8b": ModelConfig(
        **LLAMA2 | dict(vocab_size=49159, max_seq_len=131072, n_layers=40, n_kv_heads=8, ffn_dim=12800, rope_theta=1e7),
        tied=True,
        embed_scale=12.0,
        attention_scale=0.0078125,
        residual_scale=0.22,
        logits_divisor=16.0,
    ),  # fmt: skip
    # 4B to 27B: the text part.
    "gemma3-270m": ModelConfig(**GEMMA3_1B, dim=640, n_layers=18, ffn_dim=2048),
    "gemma3-1b": ModelConfig(**GEMMA3_1B, dim=1152, n_layers=26, ffn_dim=6912),
    "gemma3-4b": ModelConfig(**GEMMA3, dim=2560, n_layers=34, n_heads=8, n_kv_heads=4, ffn_dim=10240),
    "gemma3-12b": ModelConfig(**GEMMA3, dim=3840, n_layers=48, n_heads=16, n_kv_heads=8, ffn_dim=15360),
    "gemma3-27b": ModelConfig(
        **GEMMA3 | dict(head_dim=128, query_scale=168.0),
        dim=5376,
        n_layers=62,
        n_heads=32,
        n_kv_heads=16,
        ffn_dim=21504,
    ),
    "tiny-gpt2": ModelConfig(
        **GPT2 | dict(vocab_size=258, max_seq_len=256), dim=64, n_layers=2, n_heads=4, ffn_dim=256
    ),
    "tiny-llama": ModelConfig(**TINY),
    "tiny-llama3.2": ModelConfig(**TINY, rope_scaling=RopeScaling(factor=32.0, original_seq_len=64), tied=True),
    "tiny-qwen2.5": ModelConfig(**TINY, qkv_bias=True, tied=True),
    "tiny-qwen3": ModelConfig(**TINY, qk_norm=True, head_dim=32),
    "tiny-mixtral": ModelConfig(**TINY, mlp="moe", n_experts=4, top_k=2, router_aux_loss_coef=0.02),
    "tiny-olmo3": ModelConfig(
        **TINY,
        window=8,
        layer_kinds=("window", "full"),
        norm_after=True,
        qk_norm_whole=True,
        rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_seq_len=64, attention_factor=1.2, in_windows=False),
    ),
    "tiny-gemma3": ModelConfig(
        **TINY
        | GEMMA3
        | dict(
            vocab_size=258, max_seq_len=2048, head_dim=32, query_scale=24.0, window=8, layer_kinds=("window", "full")
        )
    ),
    "tiny-granite": ModelConfig(
        **TINY, tied=True, embed_scale=2.0, attention_scale=0.125, residual_scale=0.7, logits_divisor=4.0
    ),
    "tiny-ministral3": ModelConfig(
        **TINY,
        rope_scaling=RopeScaling(kind="yarn", factor=8.0, original_seq_len=8, query_growth=0.1),
        family="ministral3",
    ),
    "tiny-arcee": ModelConfig(**TINY, mlp="relu2"),
    "tiny-smollm3": ModelConfig(**TINY, tied=True, layer_kinds=("full", "full nope")),
    "tiny-phi3": ModelConfig(**TINY, window=24, layer_kinds=("window",), family="phi3"),
    "tiny-qwen3-moe": ModelConfig(
        **TINY | dict(ffn_dim=48), qk_norm=True, mlp="moe", n_experts=16, top_k=4, router_aux_loss_coef=0.001
    ),
}


def document_begins(positions):
    """positions [B, T] -> int32 [n]: where documents begin in the flattened rows, filled up with B T to a multiple of
    64, as the packed back-ends take it: the backward pass of their kernels needs memory for every entry. On a GPU the
    host waits."""
    begins = (positions.flatten() == 0).nonzero()[:, 0].int()
    filled = begins.new_full((len(begins) // 64 * 64 + 64,), positions.numel())
    filled[: len(begins)] = begins
    return filled
