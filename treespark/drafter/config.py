# SPDX-License-Identifier: Apache-2.0
"""Configuration of a drafter, with the field names of DeepSpec checkpoints.

`TreeSparkConfig` covers three block drafters by its options: DFlash (`markov_rank` 0, no confidence
head), DSpark (Markov and confidence heads) and TreeSpark (the same heads, trained with tree
losses). What it shares with other architectures is in `DrafterConfig`.
"""

from typing import Any

from transformers import PretrainedConfig

from treespark.errors import UsageError
from treespark.tree.policy import MAX_BRANCHING, MAX_BUDGET, MAX_DEPTH

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
# Lowest and highest value of each key of `tree`.
TREE_RANGES = {"depth": (1, MAX_DEPTH), "branching": (1, MAX_BRANCHING), "budget": (0, MAX_BUDGET)}
# Largest sizes accepted. Far above any published drafter, and small enough that a damaged number is
# refused before it costs memory or overflows a tensor's size.
_LARGEST = {
    "vocab_size": 2**20,
    "hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_hidden_layers": 64,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**24,
    "block_size": MAX_DEPTH,
    "num_target_layers": 1024,
}
_LARGEST_ANCHORS = 2**20
_LARGEST_RANK = 2**16
# Also refuses infinity, and whole numbers that no float can hold.
_LARGEST_REAL = 1e15


class DrafterConfig(PretrainedConfig):
    """Sizes that every drafter has; the defaults are those of Qwen3-4B drafters.

    `block_size` is B, the number of drafted depths, the anchor not counted. `target_layer_ids` are
    0-based decoder layers whose outputs are the features. Raises `UsageError` naming the field on
    values that cannot work. Source: DeepSpec config files.
    """

    vocab_size: int = 151936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40960
    block_size: int = 7
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 36
    tree: dict[str, int] | None = None
    target_fingerprint: str | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill the derived defaults, then check every field."""
        # First, as the default taps are as many as there are layers.
        _check_sizes(self)
        if self.target_layer_ids is None:
            self.target_layer_ids = default_target_layer_ids(
                self.num_target_layers, self.num_default_taps
            )
        if isinstance(self.target_layer_ids, tuple):
            self.target_layer_ids = list(self.target_layer_ids)
        if self.tree is None:
            self.tree = {"depth": self.block_size, "branching": 4, "budget": 32}
        super().__post_init__(**kwargs)
        self.check()

    @property
    def feature_size(self) -> int:
        """Width of one feature row: number of taps times hidden size."""
        assert self.target_layer_ids is not None
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def attention_input_size(self) -> int:
        """Width of the rows that a layer's attention projects."""
        return self.hidden_size

    @property
    def num_default_taps(self) -> int:
        """Target layers tapped where `target_layer_ids` is not given."""
        return self.num_hidden_layers

    @property
    def chain_only(self) -> str | None:
        """Why this drafter has no trees, as field and value; None if it has."""
        return None

    @property
    def norms_heads(self) -> bool:
        """Whether every query and key head is normed."""
        return True

    @property
    def num_head_rows(self) -> int:
        """Rows of the output head."""
        return self.vocab_size

    @property
    def has_own_head(self) -> bool:
        """Whether the output head is the drafter's own, not the target's."""
        return False

    def check(self) -> None:
        """Raise `UsageError` naming the first field whose value cannot work."""
        _check_sizes(self)
        _check_taps(self)
        _check_tree(self)
        if not isinstance(self.target_fingerprint, str | None):
            _refuse("target_fingerprint", self.target_fingerprint, "need a string or null")


class TreeSparkConfig(DrafterConfig):
    """Sizes and layout of a `TreeSparkDrafter`.

    `anchor_predicts_next` says which layout the weights were trained for: True means that slot 0
    (the anchor's slot) already predicts depth 1 and there are B slots; False means that slot d
    predicts depth d and there are B + 1 slots.
    """

    model_type = "treespark"

    mask_token_id: int = 151669
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    anchor_predicts_next: bool = True
    num_anchors: int = 512

    @property
    def num_slots(self) -> int:
        """Input slots of one block: B, plus one where the anchor's slot predicts nothing."""
        return self.block_size if self.anchor_predicts_next else self.block_size + 1

    @property
    def chain_only(self) -> str | None:
        """See DrafterConfig: an rnn head has a state per path."""
        is_rnn = self.markov_rank > 0 and self.markov_head_type == "rnn"
        return "markov_head_type 'rnn'" if is_rnn else None

    def check(self) -> None:
        """See DrafterConfig."""
        super().check()
        _check_heads(self)


def _refuse(field: str, value: object, allowed: str) -> None:
    raise UsageError(f"drafter config: {field} is {value!r}; {allowed}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_count(config: DrafterConfig, field: str, largest: int) -> None:
    value = getattr(config, field)
    if not _is_int(value) or not 1 <= value <= largest:
        _refuse(field, value, f"an integer in 1..{largest} is needed")


def _check_sizes(config: DrafterConfig) -> None:
    for field, largest in _LARGEST.items():
        _check_count(config, field, largest)
    if config.max_position_embeddings < config.block_size + 1:
        _refuse(
            "max_position_embeddings",
            config.max_position_embeddings,
            f"a block needs {config.block_size + 1} positions (block_size and the anchor)",
        )
    if config.num_attention_heads % config.num_key_value_heads:
        _refuse(
            "num_key_value_heads",
            config.num_key_value_heads,
            f"it must divide num_attention_heads ({config.num_attention_heads})",
        )
    if config.head_dim % 2:
        _refuse("head_dim", config.head_dim, "rotary positions need an even number")
    for field in ("rms_norm_eps", "rope_theta", "initializer_range"):
        value = getattr(config, field)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _LARGEST_REAL:
            _refuse(field, value, "a positive number is needed")
    if config.hidden_act != "silu":
        _refuse("hidden_act", config.hidden_act, "only 'silu' is supported")
    if config.tie_word_embeddings:
        _refuse("tie_word_embeddings", True, "a drafter keeps embedding and head apart: false")


def _check_taps(config: DrafterConfig) -> None:
    taps, last = config.target_layer_ids, config.num_target_layers - 1
    if not isinstance(taps, list) or not taps or not all(_is_int(tap) for tap in taps):
        _refuse("target_layer_ids", taps, "a list of at least one layer number is needed")
    assert taps is not None  # for the type checker
    if any(tap < 0 or tap >= last for tap in taps) or sorted(set(taps)) != taps:
        _refuse(
            "target_layer_ids",
            taps,
            f"need ascending layer numbers in 0..{last - 1}: the target has "
            f"{config.num_target_layers} layers (num_target_layers) and the output of the last one "
            "differs between capture methods, so it is not allowed",
        )


def _check_heads(config: TreeSparkConfig) -> None:
    _check_count(config, "num_anchors", _LARGEST_ANCHORS)
    if not _is_int(config.mask_token_id) or not 0 <= config.mask_token_id < config.vocab_size:
        _refuse(
            "mask_token_id", config.mask_token_id, f"need 0..{config.vocab_size - 1} (vocab_size)"
        )
    if not _is_int(config.markov_rank) or not 0 <= config.markov_rank <= _LARGEST_RANK:
        _refuse("markov_rank", config.markov_rank, f"need 0 (no Markov head) to {_LARGEST_RANK}")
    if config.markov_head_type not in MARKOV_HEAD_TYPES:
        _refuse(
            "markov_head_type", config.markov_head_type, f"one of {', '.join(MARKOV_HEAD_TYPES)}"
        )
    for field in ("enable_confidence_head", "confidence_head_with_markov", "anchor_predicts_next"):
        if not isinstance(getattr(config, field), bool):
            _refuse(field, getattr(config, field), "true or false is needed")
    confidence_needs_markov = config.enable_confidence_head and config.confidence_head_with_markov
    if confidence_needs_markov and config.markov_rank == 0:
        _refuse("confidence_head_with_markov", True, "it needs a Markov head: markov_rank > 0")


def _check_tree(config: DrafterConfig) -> None:
    tree = config.tree
    if not isinstance(tree, dict) or sorted(tree) != sorted(TREE_RANGES):
        _refuse("tree", tree, f"need exactly the keys {', '.join(TREE_RANGES)}")
    assert tree is not None  # for the type checker
    for key, (lowest, highest) in TREE_RANGES.items():
        if not _is_int(tree[key]) or not lowest <= tree[key] <= highest:
            _refuse(f"tree.{key}", tree[key], f"an integer in {lowest}..{highest} is needed")
    if tree["depth"] > config.block_size:
        _refuse("tree.depth", tree["depth"], f"at most block_size ({config.block_size})")


def default_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Return one tapped target layer per draft layer, spread evenly, ends left out.

    Tap i is round(1 + i * (n - 4) / (m - 1)); a single tap is n // 2.
    Raises `UsageError` if the target is too shallow for so many distinct taps. Source: z-lab
    DFlash.
    """
    if num_draft_layers == 1:
        taps = [num_target_layers // 2]
    else:
        span = num_target_layers - 4
        taps = [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    if sorted(set(taps)) != taps or taps[0] < 0 or taps[-1] > num_target_layers - 2:
        raise UsageError(
            f"num_hidden_layers {num_draft_layers}: a target of {num_target_layers} layers has no "
            "so many distinct default taps; set target_layer_ids"
        )
    return taps


def count_parameters(config: TreeSparkConfig) -> dict[str, int]:
    """Return {'trainable', 'frozen'}: drafter weights, and the target's embedding plus head."""
    hidden, dim, rank = config.hidden_size, config.head_dim, config.markov_rank
    q_size, kv_size = config.num_attention_heads * dim, config.num_key_value_heads * dim
    layer = hidden * (2 * q_size + 2 * kv_size) + 2 * dim
    layer += 3 * hidden * config.intermediate_size + 2 * hidden
    total = config.num_hidden_layers * layer + hidden * config.feature_size + 2 * hidden
    if rank:
        total += 2 * config.vocab_size * rank
        if config.markov_head_type == "gated":
            total += rank * (hidden + rank) + rank
        if config.markov_head_type == "rnn":
            total += 3 * rank * (2 * rank + hidden) + 3 * rank
    if config.enable_confidence_head:
        total += hidden + (rank if config.confidence_head_with_markov else 0) + 1
    return {"trainable": total, "frozen": 2 * config.vocab_size * hidden}
