# SPDX-License-Identifier: Apache-2.0
"""The EAGLE-3 drafter: golden rounds, training equal to drafting, context by parts.

float32 with other orders of additions agrees to 1e-5; "does not affect" is compared exactly.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.drafter.helpers import HIDDEN, VOCAB, features, tiny_target
from treespark.drafter.eagle3 import Eagle3Config, Eagle3Drafter
from treespark.drafter.loading import TargetWeights
from treespark.errors import UsageError

LENGTH = 20


def tiny_eagle3(seed: int = 0, **changes: Any) -> Eagle3Drafter:
    """A drafter of 4 steps for the target of `tiny_target`, with weights that all matter."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 512,
        "block_size": 4,
        "target_layer_ids": [1, 3, 5],
        "num_target_layers": 8,
        "target_fingerprint": f"target-{seed}",
    }
    torch.manual_seed(seed)
    target = tiny_target(seed)
    drafter = Eagle3Drafter.init_from_target(
        Eagle3Config(**{**fields, **changes}), target.embed_weight, target.head_weight
    )
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.requires_grad:
                scale = 0.1 if "norm" in name else 0.25
                parameter.add_(torch.randn_like(parameter) * scale)
    return drafter


def load_golden(folder: Path) -> Eagle3Drafter:
    """The drafter of a DeepSpec folder, whose config does not say how deep its target is."""
    tensors = load_file(folder / "model.safetensors")
    weights = (tensors["embed_tokens.weight"], tensors["lm_head.weight"])
    return Eagle3Drafter.from_pretrained(folder, TargetWeights(*weights, num_layers=64))


def golden_folders(root: Path) -> list[Path]:
    return sorted(path.parent for path in (root / "eagle3_parity").rglob("config.json"))


def ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def draft(drafter: Eagle3Drafter, rows: Tensor, tokens: Tensor, anchor: Tensor) -> Tensor:
    """One block after the context `rows`, in a fresh cache."""
    cache = drafter.new_cache(1, len(rows) + 1)
    drafter.extend_context(cache, 0, 0, rows, tokens)
    return drafter.draft_block(cache, [0], [len(rows)], anchor.view(1))


# ---------------------------------------------------------------------- golden


def test_two_golden_rounds_are_reproduced(fixtures_dir):
    folders = golden_folders(fixtures_dir)
    assert folders
    for folder in folders:
        case, drafter = load_file(folder / "case.safetensors"), load_golden(folder)
        length, anchor = case["prompt_ids"].shape[1], case["anchor_token"]
        cache = drafter.new_cache(2, length + 8)
        half = length // 2
        for start, stop in ((0, half), (half, length)):
            part = case["features"][0, start:stop], case["prompt_ids"][0, start:stop]
            drafter.extend_context(cache, 1, start, *part)
        assert_round(drafter, cache, length, anchor, case, "")
        # The draft is replaced by what was committed, whose last token is the next anchor.
        tokens = case["committed_tokens"][0]
        rows = torch.cat((anchor, tokens[:-1]))
        drafter.extend_context(cache, 1, length, case["committed_features"][0], rows)
        assert_round(drafter, cache, length + len(rows), tokens[-1:], case, "_round2")


def assert_round(drafter, cache, length, anchor, case, suffix):
    hidden = drafter.draft_block(cache, [1], [length], anchor)
    tokens, logits = drafter.chain(hidden, anchor)
    expected = case[f"chain_logits{suffix}"]
    assert torch.equal(tokens, case[f"chain_tokens{suffix}"])
    # 1e-4 of the largest value: from the fixtures' own description.
    atol = 1e-4 * expected.abs().max().item()
    torch.testing.assert_close(logits, expected, rtol=0, atol=atol)


def test_the_golden_output_of_the_prefix_is_fed_on_without_the_norm(fixtures_dir):
    folder = golden_folders(fixtures_dir)[0]
    case, drafter = load_file(folder / "case.safetensors"), load_golden(folder)
    seen = []
    drafter.layer.register_forward_hook(lambda module, args, output: seen.append(output))
    rows = case["features"][0], case["prompt_ids"][0]
    draft(drafter, *rows, case["anchor_token"][0])
    expected = case["hidden_after_prefix"][0]
    torch.testing.assert_close(seen[0], expected, rtol=0, atol=1e-4 * expected.abs().max().item())


# ---------------------------------------------------------------------- training


def drafted_row(drafter: Eagle3Drafter, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and features of a row that goes on with what is drafted behind `context`; the block."""
    tokens, rows = ids(1, LENGTH), features(1, LENGTH)
    hidden = draft(drafter, rows[:context], tokens[:context], tokens[context])
    chain, _ = drafter.chain(hidden, tokens[context : context + 1])
    tokens[context + 1 : context + 1 + chain.shape[1]] = chain[0]
    return tokens, rows, hidden


@pytest.mark.parametrize("context", [1, 2, 9, LENGTH - 5])
def test_training_blocks_equal_drafted_blocks(context):
    drafter = tiny_eagle3()
    tokens, rows, hidden = drafted_row(drafter, context)
    anchors = torch.tensor([[3, context, 11]])
    keep = torch.tensor([[True, True, False]])
    found = drafter.training_blocks(tokens[None], rows[None], anchors, keep)
    assert found.shape == (1, 3, drafter.config.block_size, HIDDEN)
    torch.testing.assert_close(found[0, 1], hidden[0], rtol=0, atol=1e-5)


def test_a_block_sees_features_before_its_anchor_and_tokens_before_its_label():
    drafter = tiny_eagle3()
    tokens, rows = ids(2, 1, LENGTH), features(2, 1, LENGTH)
    anchors, keep = torch.tensor([[6, 10]]), torch.ones(1, 2, dtype=torch.bool)
    before = drafter.training_blocks(tokens, rows, anchors, keep)
    later = rows.clone()
    later[:, 6:] += 1.0
    assert torch.equal(before[0, 0], drafter.training_blocks(tokens, later, anchors, keep)[0, 0])
    for position in range(6):
        changed = rows.clone()
        changed[:, position] += 1.0
        after = drafter.training_blocks(tokens, changed, anchors, keep)
        assert not torch.allclose(before[0, 0], after[0, 0]), position
    # Depth d predicts token a + d and is given the tokens up to a + d - 1.
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCAB
    after = drafter.training_blocks(changed, rows, anchors, keep)
    assert torch.equal(before[0, 0, :2], after[0, 0, :2])
    assert not torch.allclose(before[0, 0, 2], after[0, 0, 2])
    assert not torch.allclose(before[0, 1, 0], after[0, 1, 0])


def test_every_trained_weight_gets_a_finite_gradient_and_the_targets_none():
    drafter = tiny_eagle3()
    anchors, keep = torch.tensor([[0, 5], [9, -3]]), torch.tensor([[True, True], [True, False]])
    hidden = drafter.training_blocks(ids(3, 2, LENGTH), features(3, 2, LENGTH), anchors, keep)
    assert hidden.isfinite().all()
    hidden[keep].square().sum().backward()
    for name, parameter in drafter.named_parameters():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            assert parameter.grad is None
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.abs().max() > 0, name


# ---------------------------------------------------------------------- context


def test_context_added_in_parts_equals_a_full_recompute():
    drafter, tokens, rows = tiny_eagle3(), ids(4, LENGTH), features(4, LENGTH)
    cache = drafter.new_cache(3, LENGTH)
    for start, stop in ((0, 0), (0, 1), (1, 7), (7, 7), (7, 8), (8, 12), (12, 17)):
        drafter.extend_context(cache, 2, start, rows[start:stop], tokens[start:stop])
        if stop == 0:
            continue
        hidden = drafter.draft_block(cache, [2], [stop], tokens[stop : stop + 1])
        expected = draft(drafter, rows[:stop], tokens[:stop], tokens[stop])
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kept", [0, 1, 9, 13])
def test_a_context_goes_on_from_any_position_it_holds(kept):
    """What comes behind a common beginning is replaced, also in a copy of the slot's rows."""
    drafter, tokens, rows = tiny_eagle3(), ids(4, LENGTH), features(4, LENGTH)
    others = ids(9, LENGTH), features(9, LENGTH)
    others[0][:kept], others[1][:kept] = tokens[:kept], rows[:kept]
    cache = drafter.new_cache(2, LENGTH)
    drafter.extend_context(cache, 0, 0, others[1], others[0])
    for tensor in cache.keys + cache.values:
        tensor[1, :, :kept] = tensor[0, :, :kept]
    for slot in (0, 1):
        drafter.extend_context(cache, slot, kept, rows[kept:14], tokens[kept:14])
        hidden = drafter.draft_block(cache, [slot], [14], tokens[14:15])
        expected = draft(drafter, rows[:14], tokens[:14], tokens[14])
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-5)


def test_requests_share_a_cache_without_seeing_each_other():
    drafter = tiny_eagle3()
    cache = drafter.new_cache(4, LENGTH)
    for tensor in cache.keys + cache.values:
        tensor.fill_(float("nan"))
    lengths, slots, anchors = [1, 11, 3], [3, 0, 2], torch.tensor([7, 8, 9])
    rows = [(features(10 + i, n), ids(10 + i, n)) for i, n in enumerate(lengths)]
    joined = [torch.cat(part) for part in zip(*rows, strict=True)]
    drafter.extend_contexts(cache, slots, [0, 0, 0], lengths, *joined)
    before = [t.clone() for t in cache.keys + cache.values]
    hidden = drafter.draft_block(cache, slots, lengths, anchors)
    for old, new in zip(before, cache.keys + cache.values, strict=True):
        assert torch.equal(old.nan_to_num(7), new.nan_to_num(7))
    for i, row in enumerate(rows):
        torch.testing.assert_close(
            hidden[i : i + 1], draft(drafter, *row, anchors[i]), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("num_depths", [1, 3])
def test_a_shorter_chain_takes_fewer_steps_and_has_the_same_beginning(num_depths):
    drafter, calls = tiny_eagle3(), []
    cache, anchors = drafter.new_cache(1, LENGTH), torch.tensor([7])
    drafter.extend_contexts(cache, [0], [0], [9], features(1, 9), ids(1, 9))
    whole = drafter.draft_block(cache, [0], [9], anchors)
    drafter.layer.register_forward_hook(lambda *_: calls.append(1))
    hidden = drafter.draft_block(cache, [0], [9], anchors, num_depths)
    assert torch.equal(hidden, whole[:, :num_depths])
    assert len(calls) == num_depths


def test_prepacked_weights_draft_the_same():
    drafter, tokens, rows = tiny_eagle3(), ids(5, LENGTH), features(5, LENGTH)
    expected = [draft(drafter, rows[:n], tokens[:n], tokens[n]) for n in (1, 9)]
    drafter.prepack()
    for n, hidden in zip((1, 9), expected, strict=True):
        found = draft(drafter, rows[:n], tokens[:n], tokens[n])
        torch.testing.assert_close(found, hidden, rtol=0, atol=1e-5)


def test_trees_are_refused_by_name():
    with pytest.raises(UsageError, match="model_type 'treespark_eagle3' can only draft chains"):
        tiny_eagle3().node_children(torch.zeros(1, 4, HIDDEN))
