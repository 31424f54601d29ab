# SPDX-License-Identifier: Apache-2.0
"""The numbers that the TreeSpark paper states in its text, and which runs they may stand beside.

Its tables' cells are not known to us, so these are all there are. Throughput in output tokens per
second, gains in per cent, position-wise rates in per cent. Roles: DSpark's chain is the baseline,
DSpark+Tree (the tree without tree losses) the control.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treespark.bench.report.study import Study

BASELINE, CONTROL, FULL = "baseline", "control", "full"
_ABLATIONS = ("no-survival", "no-coverage", "head-dim-128")

# (model, metric, group, concurrency, role) -> suite mean. Acceptance is given without concurrency.
MEANS = {
    ("4B", "acceptance_length", "general", None, BASELINE): 4.23,
    ("4B", "acceptance_length", "general", None, CONTROL): 4.93,
    ("4B", "acceptance_length", "general", None, FULL): 5.25,
    ("8B", "acceptance_length", "general", None, BASELINE): 4.20,
    ("8B", "acceptance_length", "general", None, FULL): 5.18,
    ("4B", "acceptance_length", "writing", None, BASELINE): 2.68,
    ("4B", "acceptance_length", "writing", None, FULL): 3.52,
    ("8B", "acceptance_length", "writing", None, BASELINE): 2.55,
    ("8B", "acceptance_length", "writing", None, FULL): 3.35,
    ("4B", "system", "general", 12, BASELINE): 254.68,
    ("4B", "system", "general", 12, CONTROL): 283.54,
    ("4B", "system", "general", 12, FULL): 295.34,
    ("4B", "system", "general", 12, "head-dim-128"): 289.64,
    ("4B", "system", "general", 36, BASELINE): 574.45,
    ("4B", "system", "general", 36, CONTROL): 615.68,
    ("4B", "system", "general", 36, FULL): 646.44,
    ("4B", "per_request", "general", 6, BASELINE): 29.39,
    ("4B", "per_request", "general", 6, FULL): 33.63,
    ("4B", "per_request", "general", 12, BASELINE): 23.76,
    ("4B", "per_request", "general", 12, CONTROL): 26.66,
    ("4B", "per_request", "general", 12, FULL): 27.86,
    ("4B", "per_request", "general", 12, "head-dim-128"): 27.29,
    ("4B", "per_request", "general", 36, BASELINE): 22.08,
    ("4B", "per_request", "general", 36, CONTROL): 23.84,
    ("4B", "per_request", "general", 36, FULL): 24.55,
}

# (model, metric, group, concurrency, role, role of the base) -> gain in per cent.
GAINS = {
    ("4B", "acceptance_length", "general", None, FULL, BASELINE): 24.1,
    ("8B", "acceptance_length", "general", None, FULL, BASELINE): 23.4,
    ("4B", "acceptance_length", "writing", None, FULL, BASELINE): 31.4,
    ("8B", "acceptance_length", "writing", None, FULL, BASELINE): 31.6,
    ("4B", "acceptance_length", "general", None, FULL, CONTROL): 6.4,
    ("4B", "single_request", "general", 1, FULL, BASELINE): 15.1,
    ("8B", "single_request", "general", 1, FULL, BASELINE): 17.9,
    ("4B", "single_request", "writing", 1, FULL, BASELINE): 21.9,
    ("8B", "single_request", "writing", 1, FULL, BASELINE): 25.0,
    ("4B", "system", "general", 6, FULL, BASELINE): 16.3,
    ("4B", "system", "general", 12, FULL, BASELINE): 17.2,
    ("4B", "system", "general", 36, FULL, BASELINE): 12.6,
    ("4B", "system", "general", 12, "no-survival", BASELINE): 11.9,
    ("4B", "system", "general", 12, "no-coverage", BASELINE): 16.0,
    ("4B", "system", "general", 12, "head-dim-128", BASELINE): 14.6,
    ("4B", "system", "general", 12, FULL, CONTROL): 4.2,
    ("4B", "system", "general", 36, FULL, CONTROL): 5.0,
    ("4B", "per_request", "general", 6, FULL, BASELINE): 15.5,
    ("4B", "per_request", "general", 12, FULL, BASELINE): 17.6,
    ("4B", "per_request", "general", 36, FULL, BASELINE): 11.8,
    ("4B", "per_request", "general", 12, "no-survival", BASELINE): 12.8,
    ("4B", "per_request", "general", 12, "no-coverage", BASELINE): 15.0,
    ("4B", "per_request", "general", 12, "head-dim-128", BASELINE): 15.3,
}

# Position-wise acceptance at concurrency 12 on Qwen3-4B: (role, depth) -> per cent. The paper does
# not say which denominator it takes for trees.
POSITIONS = {
    (BASELINE, 1): 78.8,
    (FULL, 1): 90.0,
    (BASELINE, 7): 24.7,
    (FULL, 7): 37.0,
}

_MAX_TOKENS, _DEPTH, _BUDGET, _NUM_GENERAL, _NUM_WRITING = 2048, 7, 32, 9, 6


def role(study: Study, method: str) -> str | None:
    """Return what a method is in the paper's terms; None for one that it has no numbers of."""
    if method == study.setting.baseline:
        return BASELINE
    if method == study.setting.control:
        return CONTROL
    if study.treespark is not None and method == study.treespark.name:
        return FULL
    return next((name for name in _ABLATIONS if method.endswith(name)), None)


def model_of(study: Study, *, timed: bool) -> str | None:
    """Return "4B" or "8B" where the paper's numbers may stand beside the study's, else None.

    timed: for throughput, which also asks for the paper's kind of device.
    """
    return None if mismatch(study, timed=timed) else _model(study)


def mismatch(study: Study, *, timed: bool) -> str | None:
    """Return what sets a study apart from the paper's setting; None if nothing does."""
    setting = study.setting
    if _model(study) is None:
        return f"its targets are Qwen3-4B and Qwen3-8B, this one is {study.name}"
    if setting.max_tokens != _MAX_TOKENS:
        return f"its answers have up to {_MAX_TOKENS} tokens, these {setting.max_tokens}"
    if len(study.group("general")) not in (0, _NUM_GENERAL):
        return f"its general suite has {_NUM_GENERAL} sets, this one {len(study.group('general'))}"
    if len(study.group("writing")) not in (0, _NUM_WRITING):
        return f"its writing suite has {_NUM_WRITING} domains"
    full = study.treespark
    if full is not None and (full.depth, full.budget) != (_DEPTH, _BUDGET):
        return f"its trees have {_BUDGET} nodes in {_DEPTH} depths"
    if timed and not _same_device(setting.device):
        return f"its times are of Ascend 910B cards, these of {setting.device}"
    return None


def _model(study: Study) -> str | None:
    found = re.fullmatch(r"qwen3-(4b|8b)", study.name, re.IGNORECASE)
    return found[1].upper() if found else None


def _same_device(device: str) -> bool:
    from treespark.device import PREFERENCE

    return device.partition(":")[0] == PREFERENCE[0]
