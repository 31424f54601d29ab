# SPDX-License-Identifier: Apache-2.0
"""Write tiny random drafter folders as other projects write them, for tests and trials.

    python tools/make_tiny_drafters.py OUT_DIR [--layout zlab-dflash ...] [--seed 0]

They fit the target that `tools/make_tiny_models.py OUT_DIR --family llama --layers 8` writes.
Nothing here uses what reads or writes those layouts in treespark: the folders are written down from
the config classes and modules of DeepSpec, z-lab/dflash, SpecForge and speculators.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

VOCAB_SIZE, NUM_LAYERS = 272, 8
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, RANK, REDUCED = 32, 48, 4, 2, 12, 8, 40
TAPS = [1, 3, 5]

_Tensors = dict[str, Tensor]


class Maker:
    """Draws weights and writes folders for a target of `vocab_size` and `num_layers`."""

    def __init__(
        self, vocab_size: int = VOCAB_SIZE, num_layers: int = NUM_LAYERS, seed: int = 0
    ) -> None:
        self.vocab_size, self.num_layers = vocab_size, num_layers
        self.mask_token_id = vocab_size - 1
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, *shape: int) -> Tensor:
        """Return random weights, of vectors around 1."""
        scale = 0.2 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
        return torch.randn(*shape, generator=self.generator) * scale + (len(shape) == 1)

    def layer(self, prefix: str, rows: int = HIDDEN, head_norms: bool = True) -> _Tensors:
        """Return a decoder layer whose attention reads rows of this width."""
        shapes: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, rows),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, rows),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, rows),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        if head_norms:
            shapes |= {"self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,)}
        return {f"{prefix}.{name}.weight": self.draw(*shape) for name, shape in shapes.items()}

    def block(self) -> _Tensors:
        """Return the backbone of a block drafter of two layers."""
        tensors = {**self.layer("layers.0"), **self.layer("layers.1")}
        tensors["fc.weight"] = self.draw(HIDDEN, len(TAPS) * HIDDEN)
        return tensors | {f"{name}.weight": self.draw(HIDDEN) for name in ("norm", "hidden_norm")}

    def heads(self, prefix: str = "") -> _Tensors:
        """Return the Markov and confidence heads of DSpark."""
        return {
            f"{prefix}markov_head.markov_w1.weight": self.draw(self.vocab_size, RANK),
            f"{prefix}markov_head.markov_w2.weight": self.draw(self.vocab_size, RANK),
            f"{prefix}confidence_head.proj.weight": self.draw(1, HIDDEN + RANK),
            f"{prefix}confidence_head.proj.bias": self.draw(1),
        }

    def eagle3(self, layer: str, rows: int, head_norms: bool = False) -> _Tensors:
        """Return an EAGLE-3 drafter with a head of `rows` rows."""
        tensors = self.layer(layer, 2 * HIDDEN, head_norms)
        tensors[f"{layer}.hidden_norm.weight"] = self.draw(HIDDEN)
        tensors["fc.weight"] = self.draw(HIDDEN, len(TAPS) * HIDDEN)
        tensors["norm.weight"] = self.draw(HIDDEN)
        return tensors | {"lm_head.weight": self.draw(rows, HIDDEN)}

    def vocabulary_map(self) -> _Tensors:
        """Return d2t and t2d of every second token, as far as the reduced head goes."""
        rows = torch.arange(REDUCED)
        t2d = torch.zeros(self.vocab_size, dtype=torch.bool)
        t2d[2 * rows] = True
        return {"d2t": rows.clone(), "t2d": t2d}

    def config(self, layers: int, **others: Any) -> dict[str, Any]:
        """Return a Qwen3 config with further fields."""
        return {
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "hidden_size": HIDDEN,
            "initializer_range": 0.02,
            "intermediate_size": INNER,
            "layer_types": ["full_attention"] * layers,
            "max_position_embeddings": 512,
            "num_attention_heads": HEADS,
            "num_hidden_layers": layers,
            "num_key_value_heads": KV_HEADS,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
            **others,
        }


def zlab_dflash(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """z-lab's DFlash: in place, its block size counts the anchor, and it names code of its own."""
    return make.config(
        2,
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        block_size=6,
        num_target_layers=make.num_layers,
        dflash_config={"mask_token_id": make.mask_token_id, "target_layer_ids": TAPS},
    ), make.block()


def specforge_dflash(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """SpecForge's DFlash: the same layout, with further keys in `dflash_config`."""
    config, tensors = zlab_dflash(make)
    del config["auto_map"]
    config["dflash_config"] |= {"attention_mode": "gqa", "projector_type": "dflash"}
    return config, tensors


def specforge_dspark(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """SpecForge's DSpark: anchor-first, its heads described in `dflash_config`."""
    return make.config(
        2,
        architectures=["DSparkDraftModel"],
        block_size=5,
        num_target_layers=make.num_layers,
        dflash_config={
            "mask_token_id": make.mask_token_id,
            "target_layer_ids": TAPS,
            "projector_type": "dspark",
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    ), make.block() | make.heads("logit_head.")


def _llama(make: Maker, **others: Any) -> dict[str, Any]:
    config = make.config(1, **{"model_type": "llama", **others})
    del config["layer_types"]
    return config


def specforge_eagle3(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """SpecForge's EAGLE-3 with a reduced vocabulary and the layers that everyone taps."""
    config = _llama(make, architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=REDUCED)
    return config, make.eagle3("midlayer", REDUCED) | make.vocabulary_map()


def specforge_eagle3_whole(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """SpecForge's EAGLE-3 with the whole vocabulary, an embedding, and named layers."""
    config = _llama(
        make,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=make.vocab_size,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": TAPS},
    )
    tensors = make.eagle3("midlayer", make.vocab_size)
    return config, tensors | {"embed_tokens.weight": make.draw(make.vocab_size, HIDDEN)}


def _speculators(kind: str, layer: dict[str, Any], steps: int, **others: Any) -> dict[str, Any]:
    """An export of speculators, which leaves out what its config classes have as a default."""
    left_out = ("hidden_act", "attention_bias", "rope_scaling", "layer_types", "initializer_range")
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "transformer_layer_config": {k: v for k, v in layer.items() if k not in left_out},
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        **others,
    }


def speculators_eagle3(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """An EAGLE-3 export with a reduced vocabulary and the normed residual."""
    config = _speculators(
        "eagle3",
        _llama(make),
        3,
        architectures=["Eagle3DraftModel"],
        draft_vocab_size=REDUCED,
        norm_before_residual=True,
        norm_before_fc=False,
        eagle_aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
    )
    return config, make.eagle3("layers.0", REDUCED) | make.vocabulary_map()


def speculators_dflash(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """A DFlash export: in place."""
    config = _speculators(
        "dflash",
        make.config(2),
        5,
        architectures=["DFlashDraftModel"],
        block_size=6,
        draft_vocab_size=make.vocab_size,
        mask_token_id=make.mask_token_id,
        aux_hidden_state_layer_ids=[tap + 1 for tap in TAPS],
        sample_from_anchor=False,
        projector_type="dflash",
    )
    return config, make.block()


def speculators_dspark(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """A DSpark export: anchor-first, with a copy of the target's norm."""
    config, tensors = speculators_dflash(make)
    del config["projector_type"]
    config |= {
        "speculators_model_type": "dspark",
        "architectures": ["DSparkDraftModel"],
        "block_size": 5,
        "sample_from_anchor": True,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return config, tensors | make.heads() | {"verifier_norm.weight": make.draw(HIDDEN)}


def deepspec_dspark(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """DeepSpec's DSpark: anchor-first, with the target's embedding and head."""
    config = make.config(
        2,
        architectures=["Qwen3DSparkModel"],
        block_size=5,
        num_target_layers=make.num_layers,
        mask_token_id=make.mask_token_id,
        target_layer_ids=TAPS,
        num_anchors=4,
        markov_rank=RANK,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    tables = ("embed_tokens.weight", "lm_head.weight")
    whole = {name: make.draw(make.vocab_size, HIDDEN) for name in tables}
    return config, make.block() | make.heads() | whole


def deepspec_dflash(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """DeepSpec's DFlash: the same without heads, still anchor-first."""
    config, tensors = deepspec_dspark(make)
    for name in ("markov_head_type", "confidence_head_with_markov"):
        del config[name]
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    return config, {k: t for k, t in tensors.items() if "_head." not in k or k.startswith("lm")}


def deepspec_eagle3(make: Maker) -> tuple[dict[str, Any], _Tensors]:
    """DeepSpec's EAGLE-3: head norms, the target's head."""
    config = make.config(
        1,
        architectures=["Qwen3Eagle3Model"],
        draft_num_hidden_layers=1,
        target_layer_ids=TAPS,
        ttt_length=4,
        step_loss_decay=0.8,
    )
    tensors = make.eagle3("layers.0", make.vocab_size, head_norms=True)
    return config, tensors | {"embed_tokens.weight": make.draw(make.vocab_size, HIDDEN)}


LAYOUTS: dict[str, Callable[[Maker], tuple[dict[str, Any], _Tensors]]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        deepspec_dspark,
        deepspec_dflash,
        deepspec_eagle3,
        zlab_dflash,
        specforge_dflash,
        specforge_dspark,
        specforge_eagle3,
        specforge_eagle3_whole,
        speculators_eagle3,
        speculators_dflash,
        speculators_dspark,
    )
}


def make_tiny_drafter(layout: str, folder: Path, make: Maker) -> Path:
    """Write a folder of a layout of `LAYOUTS` and return it."""
    config, tensors = LAYOUTS[layout](make)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors")
    return folder


def main() -> None:
    """Parse the command line and write one folder per layout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--layout", nargs="+", choices=sorted(LAYOUTS), default=sorted(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for layout in args.layout:
        if (args.out_dir / layout).exists():
            parser.error(f"OUT_DIR {args.out_dir}: {layout} is there already")
    for layout in args.layout:
        print(make_tiny_drafter(layout, args.out_dir / layout, Maker(seed=args.seed)))


if __name__ == "__main__":
    main()
