# SPDX-License-Identifier: Apache-2.0
"""Drafter folders beside a target's: what a target gives them, and `treespark drafter inspect`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from treespark.drafter.loading import TargetWeights
from treespark.target.tables import read_tables

if TYPE_CHECKING:
    from pathlib import Path


def target_weights(folder: Path) -> TargetWeights:
    """Return what a drafter takes from a target's folder. Raises UsageError as `read_tables`."""
    tables = read_tables(folder)
    return TargetWeights(
        tables.embed_weight, tables.head_weight, tables.fingerprint, tables.num_layers
    )


def print_facts(facts: dict[str, Any]) -> None:
    """Print the facts of `treespark.drafter.inspect.describe`, one a line."""
    console = Console()
    for name, value in _lines(facts):
        console.print(Text(f"{name:<16}{value}"), soft_wrap=True)


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    depth = f"{facts['block_size']} drafted tokens a block, the anchor not counted"
    lines = [
        ("folder", facts["folder"]),
        ("layout", facts["layout"]),
        ("architecture", facts["architecture"]),
        ("block", f"{depth}; {facts['block_layout']}" if facts["block_layout"] else depth),
        (
            "layers",
            f"{facts['layers']}, {facts['heads']} heads ({facts['key_value_heads']} key/value) of "
            f"width {facts['head_dim']}, hidden size {facts['hidden_size']}",
        ),
        ("taps", f"target layers {facts['target_layer_ids']} of {facts['num_target_layers']}"),
        ("vocabulary", _vocabulary(facts)),
    ]
    if "mask_token_id" in facts:
        lines.append(("mask token", str(facts["mask_token_id"])))
    held = ", ".join(facts["holds"]) or "none of the target's tables"
    lines += [
        ("parameters", f"{facts['parameters']:,} of its own, {', '.join(facts['dtypes'])}"),
        ("holds", held),
        ("context", f"{facts['max_position_embeddings']} positions"),
        ("made for", facts["target_fingerprint"] or "it does not say which target"),
        ("trained", _record(facts["record"])),
    ]
    if facts["runs_code"]:
        lines.append(("code", "auto_map asks for code of its own, which is never run"))
    if facts["misfits"] is not None:
        lines += [("does not fit", reason) for reason in facts["misfits"]] or [("fits", "yes")]
    return lines


def _vocabulary(facts: dict[str, Any]) -> str:
    rows = facts["head_rows"]
    whole = rows == facts["vocab_size"]
    return f"{facts['vocab_size']} tokens" + ("" if whole else f", {rows} of which can be drafted")


def _record(record: dict[str, Any] | None) -> str:
    if record is None:
        return "no record"
    parts = [f"{record['steps']} steps"] if "steps" in record else []
    held_out = record.get("held_out") or {}
    parts += [f"{name} {value:.2f}" for name, value in held_out.items()]
    return ", ".join(parts) or "a record without numbers"
