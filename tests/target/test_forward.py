# SPDX-License-Identifier: Apache-2.0
"""The packed forward against transformers' own: taps, chunks, ragged batches, training outputs."""

import pytest
import torch

from treespark.errors import UsageError
from treespark.target.model import Segment, TargetModel


def segment(slot: int, start: int, ids: list[int]) -> Segment:
    return Segment(slot, start, torch.tensor(ids), torch.arange(start, start + len(ids)))


def test_tap_is_the_output_of_its_decoder_layer(close, pair, poisoned, random_ids):
    ids = random_ids(23)
    out = pair.ours.prefill(poisoned(pair.ours, 1, 32), 0, 0, torch.tensor(ids))
    close(out.features, pair.features(ids))


def test_taps_come_in_the_order_asked_for(qwen3, random_ids):
    ids, hidden_size = torch.tensor([random_ids(9)]), qwen3.ours.hidden_size
    try:
        qwen3.ours.set_taps([2, 0])
        swapped, _ = qwen3.ours.sequence_outputs(ids, [9])
        qwen3.ours.set_taps([1])
        single, _ = qwen3.ours.sequence_outputs(ids, [9])
        qwen3.ours.set_taps([])
        none, _ = qwen3.ours.sequence_outputs(ids, [9])
    finally:
        qwen3.ours.set_taps([0, 2])
    features, _ = qwen3.ours.sequence_outputs(ids, [9])
    assert torch.equal(swapped, features.roll(hidden_size, -1))
    assert single.shape == (1, 9, hidden_size)
    assert none.shape == (1, 9, 0)


@pytest.mark.parametrize("ids", [[3], [0, 3], [-1], [4], [1, 1]])
def test_last_layer_and_impossible_taps_are_refused(qwen3, ids):
    with pytest.raises(UsageError, match=r"target_layer_ids \[.*0\.\.2"):
        qwen3.ours.set_taps(ids)
    assert qwen3.ours.target_layer_ids == [0, 2]


def test_logits_and_last_hidden_equal_the_reference(close, pair, poisoned, random_ids):
    ids = random_ids(30, seed=1)
    out = pair.ours.forward_rows([segment(0, 0, ids)], poisoned(pair.ours, 1, 30), logits="all")
    full = pair.full(ids)
    close(out.logits, full.logits[0])
    close(out.last_hidden, full.hidden_states[-1][0])
    assert out.logits.dtype == torch.float32


@pytest.mark.parametrize("sizes", [[37], [1, 36], [16, 16, 5], [36, 1], [1] * 37])
def test_chunked_prefill_equals_whole_prefill(close, pair, poisoned, random_ids, sizes):
    ids, cache, start, features = torch.tensor(random_ids(37)), poisoned(pair.ours, 2, 40), 0, []
    for size in sizes:
        out = pair.ours.prefill(cache, 1, start, ids[start : start + size])
        features.append(out.features)
        start += size
    close(torch.cat(features), pair.features(ids.tolist()))
    close(out.logits[0], pair.logits(ids.tolist())[-1])


def test_ragged_batch_equals_single_runs(close, pair, poisoned, random_ids):
    prompts = [random_ids(n, seed=n) for n in (5, 17, 1, 11)]
    done = [0, 9, 0, 10]
    cache = poisoned(pair.ours, 6, 20)
    slots = [4, 0, 2, 5]
    for slot, prompt, n in zip(slots, prompts, done, strict=True):
        if n:
            pair.ours.prefill(cache, slot, 0, torch.tensor(prompt[:n]))
    rows = zip(slots, prompts, done, strict=True)
    segments = [segment(slot, n, prompt[n:]) for slot, prompt, n in rows]
    every = pair.ours.forward_rows(segments, cache, logits="all")
    last = pair.ours.forward_rows(segments, cache, logits="last")
    none = pair.ours.forward_rows(segments, cache, logits="none")
    alone = [pair.logits(prompt)[n:] for prompt, n in zip(prompts, done, strict=True)]
    close(every.logits, torch.cat(alone))
    assert torch.equal(every.logits.argmax(-1), torch.cat(alone).argmax(-1))
    close(last.logits, torch.stack([rows[-1] for rows in alone]))
    assert none.logits.shape == (0, pair.ours.vocab_size)
    features = [pair.features(p)[n:] for p, n in zip(prompts, done, strict=True)]
    close(every.features, torch.cat(features))


def test_decoding_token_by_token_equals_one_forward(close, pair, poisoned, random_ids):
    ids, cache = random_ids(12), poisoned(pair.ours, 1, 12)
    rows = [pair.ours.forward_rows([segment(0, i, [t])], cache) for i, t in enumerate(ids)]
    close(torch.cat([r.logits for r in rows]), pair.logits(ids))


def test_sequence_outputs_equal_the_reference_and_pads_are_zero(close, pair, random_ids):
    rows = [random_ids(n, seed=n) for n in (14, 20, 1)]
    padded = torch.tensor([row + [7] * (20 - len(row)) for row in rows])
    features, last_hidden = pair.ours.sequence_outputs(padded, torch.tensor([14, 20, 1]))
    assert features.shape == (3, 20, 2 * pair.ours.hidden_size)
    for i, row in enumerate(rows):
        close(features[i, : len(row)], pair.features(row))
        hidden = pair.full(row).hidden_states[-1][0]
        close(last_hidden[i, : len(row)], hidden)
        assert not features[i, len(row) :].any()
        assert not last_hidden[i, len(row) :].any()


def test_sequence_outputs_can_feed_a_trainable_layer(qwen3, random_ids):
    features, _ = qwen3.ours.sequence_outputs(torch.tensor([random_ids(6)]), [6])
    layer = torch.nn.Linear(features.shape[-1], 3)
    layer(features).sum().backward()
    assert layer.weight.grad is not None
    assert not features.requires_grad


def test_logits_of_last_hidden_equal_head_weight_product(close, qwen3, random_ids):
    _, last_hidden = qwen3.ours.sequence_outputs(torch.tensor([random_ids(6)]), [6])
    expected = last_hidden @ qwen3.ours.head_weight.T
    close(qwen3.ours.logits(last_hidden), expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_prepacked_products_equal_plain_ones(close, pair, poisoned, random_ids, dtype):
    ids, outputs = torch.tensor(random_ids(25)), []
    for prepack in (True, False):
        target = TargetModel.from_pretrained(
            pair.folder, device="cpu", dtype=dtype, prepack=prepack
        )
        outputs.append(target.forward_rows([segment(0, 0, ids.tolist())], poisoned(target, 1, 25)))
    # bfloat16 keeps 8 bits: one rounding step is 0.4 % of a value, and the layers' add up.
    close(outputs[0].logits, outputs[1].logits, 1e-5 if dtype == "fp32" else 0.02)


@pytest.mark.parametrize("count", [33, 40])
def test_prompt_beyond_the_cache_or_context_is_refused_with_the_limit(qwen3, count):
    cache = qwen3.ours.new_cache(1, 32)
    with pytest.raises(UsageError, match=rf"prompt of {count} tokens.*at most 32"):
        qwen3.ours.prefill(cache, 0, 0, torch.zeros(count, dtype=torch.long))
    large = qwen3.ours.new_cache(1, 600)
    with pytest.raises(UsageError, match=r"prompt of 514 tokens.*at most 512"):
        qwen3.ours.prefill(large, 0, 500, torch.zeros(14, dtype=torch.long))


def test_empty_prompt_is_refused(qwen3):
    with pytest.raises(UsageError, match="prompt: has no token"):
        qwen3.ours.prefill(qwen3.ours.new_cache(1, 8), 0, 0, torch.zeros(0, dtype=torch.long))
