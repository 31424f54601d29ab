# SPDX-License-Identifier: Apache-2.0
"""From any drafter folder that we read to any layout that we write."""

from collections.abc import Callable
from pathlib import Path

import torch

from treespark.drafter.auto import DRAFTERS, AnyDrafter
from treespark.drafter.export import check_destination, save_deepspec, save_own
from treespark.drafter.foreign_export import save_dflash, save_llama_eagle3, save_speculators
from treespark.drafter.loading import FROZEN_KEYS, TargetWeights, frozen_keys, load_folder
from treespark.errors import UsageError

# treespark: ours.  deepspec: DSpark of vLLM and SGLang.  dflash: z-lab's.  eagle3: SpecForge's.
FORMATS: dict[str, Callable[..., None]] = {
    "treespark": save_own,
    "deepspec": save_deepspec,
    "dflash": save_dflash,
    "eagle3": save_llama_eagle3,
    "speculators": save_speculators,
}
# Formats that leave out embedding and head, which the target must then supply.
_WITHOUT_TABLES = ("treespark", "dflash", "speculators")


def convert(
    source: Path,
    out: Path,
    to: str,
    target: TargetWeights | None = None,
    *,
    verifier: str = "",
) -> None:
    """Write the drafter in `source` to the folder `out` in the layout `to`, a key of `FORMATS`.

    target: needed where source or `out` leave out embedding and head, which must be the target's,
    and where the layout does not say how deep its target is. verifier: the target's name in a
    speculators config. Every tensor keeps its dtype. No code in `source` is run. Raises
    `UsageError` naming the field or tensor that does not fit, with nothing written.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to}: allowed: {', '.join(FORMATS)}")
    if to == "speculators" and not verifier:
        raise UsageError("--to speculators: needs --verifier, the target's name, which vLLM reads")
    check_destination(out, source)
    if to in _WITHOUT_TABLES and target is None:
        raise UsageError(f"--to {to}: needs --target, whose embedding and head are left out")
    drafter = load_folder(source, DRAFTERS, target, device="cpu", keep_dtypes=True, skip_code=True)
    if to in _WITHOUT_TABLES and target is not None:
        _check_tables(source, drafter, target)
    options = {"verifier": verifier} if to == "speculators" else {}
    FORMATS[to](drafter, out, **options)


def _check_tables(source: Path, drafter: AnyDrafter, target: TargetWeights) -> None:
    """Refuse a drafter with tables of its own."""
    weights = dict(zip(FROZEN_KEYS, (target.embed_weight, target.head_weight), strict=True))
    stored = drafter.state_dict()
    for key in frozen_keys(drafter.config):
        if not torch.equal(stored[key], weights[key]):
            raise UsageError(
                f"drafter {source}: {key} is not the target's, and the new layout would leave it "
                "out; choose the right --target, or --to deepspec"
            )
