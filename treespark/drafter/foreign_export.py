# SPDX-License-Identifier: Apache-2.0
"""Writes drafters in the layouts of z-lab, SpecForge (SGLang, vLLM) and speculators.

The inverse of `foreign_config.py` and `foreign_tensors.py`: what is written here is read there as
the same drafter. Embedding and head are left out where the format takes the target's.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespark.drafter.base import DrafterModel
from treespark.drafter.config import DrafterConfig, TreeSparkConfig
from treespark.drafter.config_json import DFLASH, LLAMA_EAGLE3
from treespark.drafter.eagle3 import Eagle3Config
from treespark.drafter.export import dtype_name, plain_fields, storable, write_folder
from treespark.drafter.foreign_tensors import OWN_LAYER, SPECFORGE_LAYER, target_to_draft
from treespark.drafter.loading import frozen_keys
from treespark.errors import UsageError

# The three taps that SGLang's and vLLM's EAGLE-3 fuse.
_SERVED_TAPS = 3


def save_dflash(drafter: DrafterModel, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write an in-place DFlash drafter as z-lab does; SGLang and vLLM load it as DFlashDraftModel.

    Raises `UsageError` for any other drafter, and where `write_folder` does.
    """
    config = drafter.config
    if not isinstance(config, TreeSparkConfig):
        raise UsageError(f"model_type is {config.model_type!r}: --to dflash needs a block drafter")
    if config.anchor_predicts_next:
        raise UsageError(
            "anchor_predicts_next is True: loaders of DFlashDraftModel never read slot 0; a DFlash "
            "drafter of the anchor-first layout has the format deepspec alone"
        )
    if config.markov_rank or config.enable_confidence_head:
        name = "markov_rank" if config.markov_rank else "enable_confidence_head"
        raise UsageError(f"{name} is {getattr(config, name)}: --to dflash has no heads")
    fields = plain_fields(config) | {
        "architectures": [DFLASH],
        "block_size": config.block_size + 1,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": config.target_layer_ids,
        },
    }
    # The two lists stand in dflash_config alone.
    fields.pop("target_layer_ids")
    tensors = storable(_without_targets(drafter), dtype)
    write_folder(folder, {**fields, "dtype": dtype_name(tensors)}, tensors)


def save_llama_eagle3(
    drafter: DrafterModel, folder: Path, dtype: torch.dtype | None = None
) -> None:
    """Write an EAGLE-3 drafter as SpecForge does; SGLang and vLLM load it.

    Embedding and head are in it. Raises `UsageError` for what their layer does not compute, and
    where `write_folder` does.
    """
    config = drafter.config
    if not isinstance(config, Eagle3Config):
        raise UsageError(f"model_type is {config.model_type!r}: --to eagle3 needs EAGLE-3")
    _check_served_eagle3(config)
    if config.norm_before_residual:
        raise UsageError("norm_before_residual is True: SGLang's layer has no such option")
    fields = plain_fields(config) | {
        "architectures": [LLAMA_EAGLE3],
        "model_type": "llama",
        "mlp_bias": False,
        "draft_vocab_size": config.num_head_rows,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": config.target_layer_ids,
        },
        # vLLM names a tap by the layer that reads it.
        "eagle_aux_hidden_state_layer_ids": _readers(config),
    }
    fields.pop("target_layer_ids")
    tensors = {
        key.replace(OWN_LAYER, SPECFORGE_LAYER): tensor
        for key, tensor in _with_map(drafter).items()
    }
    tensors = storable(tensors, dtype)
    write_folder(folder, {**fields, "dtype": dtype_name(tensors)}, tensors)


def save_speculators(
    drafter: DrafterModel, folder: Path, dtype: torch.dtype | None = None, verifier: str = ""
) -> None:
    """Write a drafter as speculators does; vLLM loads EAGLE-3, DFlash and DSpark from it.

    verifier: name of the target, which vLLM reads. Raises `UsageError` where `write_folder` does.
    """
    config = drafter.config
    kind = _speculators_kind(config)
    fields = plain_fields(config)
    fields.pop("target_layer_ids")
    layer = {name: value for name, value in fields.items() if name != "num_target_layers"}
    raw: dict[str, Any] = {
        "speculators_model_type": kind,
        "architectures": [_SPECULATORS_CLASSES[kind]],
        "draft_vocab_size": config.num_head_rows,
        # None of its own fields, but without it the folder needs its target to be read.
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    if isinstance(config, Eagle3Config):
        _check_taps(config)
        layer["model_type"] = "qwen3" if config.qk_norm else "llama"
        raw["norm_before_residual"] = config.norm_before_residual
        raw["norm_before_fc"] = False
        raw["eagle_aux_hidden_state_layer_ids"] = _readers(config)
        tensors = _with_map(drafter)
    else:
        assert isinstance(config, TreeSparkConfig)
        raw |= _speculators_block(config)
        tensors = _without_targets(drafter)
    tensors = storable(tensors, dtype)
    write_folder(folder, {**raw, "dtype": dtype_name(tensors)}, tensors)


_SPECULATORS_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
}


def _speculators_kind(config: DrafterConfig) -> str:
    if isinstance(config, Eagle3Config):
        return "eagle3"
    assert isinstance(config, TreeSparkConfig)
    return "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"


def _speculators_block(config: TreeSparkConfig) -> dict[str, Any]:
    """Fields of a DFlash or DSpark export; its `block_size` counts slots."""
    fields: dict[str, Any] = {
        "block_size": config.num_slots,
        "sample_from_anchor": config.anchor_predicts_next,
        "aux_hidden_state_layer_ids": _readers(config),
        "mask_token_id": config.mask_token_id,
    }
    if _speculators_kind(config) == "dspark":
        names = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov"
        fields |= {name: getattr(config, name) for name in names.split()}
    return fields


def _readers(config: DrafterConfig) -> list[int]:
    """The layers that read the tapped outputs."""
    assert config.target_layer_ids is not None
    return [tap + 1 for tap in config.target_layer_ids]


def _check_served_eagle3(config: Eagle3Config) -> None:
    if config.qk_norm:
        raise UsageError(
            "qk_norm is True: SGLang's and vLLM's EAGLE-3 layer is Llama's, without head norms"
        )
    _check_taps(config)


def _check_taps(config: Eagle3Config) -> None:
    taps = config.target_layer_ids
    assert taps is not None
    if len(taps) != _SERVED_TAPS:
        raise UsageError(
            f"target_layer_ids is {taps}: SGLang's and vLLM's EAGLE-3 fuses {_SERVED_TAPS} layers"
        )


def _without_targets(drafter: DrafterModel) -> dict[str, Tensor]:
    left_out = frozen_keys(drafter.config)
    return {key: t for key, t in drafter.state_dict().items() if key not in left_out}


def _with_map(drafter: DrafterModel) -> dict[str, Tensor]:
    """All tensors, and t2d beside d2t; the identity map of a whole vocabulary is left out."""
    tensors, config = dict(drafter.state_dict()), drafter.config
    if not config.has_own_head:
        return tensors
    if config.num_head_rows == config.vocab_size and not tensors["d2t"].any():
        tensors.pop("d2t")
        return tensors
    return tensors | {"t2d": target_to_draft(tensors["d2t"], config.vocab_size)}
