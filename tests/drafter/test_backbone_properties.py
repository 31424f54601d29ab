# SPDX-License-Identifier: Apache-2.0
"""What the backbone sees and what it does not: context, other blocks, positions, layouts.

float32 with other orders of additions agrees to 1e-5; "does not affect" is compared exactly.
"""

import pytest
import torch
from torch import Tensor

import treespark.drafter.attention as attention
from tests.drafter.helpers import HIDDEN, VOCAB, features, tiny_config, tiny_drafter
from treespark.drafter.backbone import RotaryTable, rotate
from treespark.drafter.cache import DraftCache
from treespark.drafter.modeling import TreeSparkDrafter

LENGTH = 24


@pytest.fixture(params=[True, False], ids=["anchor_first", "in_place"])
def drafter(request: pytest.FixtureRequest) -> TreeSparkDrafter:
    return tiny_drafter(anchor_predicts_next=request.param)


def training_inputs(seed: int = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB - 1, (2, LENGTH), generator=generator)
    anchors = torch.tensor([[0, 4, 11, LENGTH - 1], [2, 9, 10, 0]])
    keep = torch.tensor([[True, True, True, True], [True, True, True, False]])
    return ids, features(seed, 2, LENGTH), anchors, keep


def draft(drafter: TreeSparkDrafter, rows: Tensor, anchor: Tensor) -> Tensor:
    """One block after the context `rows`, in a fresh cache."""
    cache = drafter.new_cache(1, rows.shape[0] + 1)
    drafter.extend_context(cache, 0, 0, rows)
    return drafter.draft_block(cache, [0], [rows.shape[0]], anchor.view(1))


def test_context_added_in_parts_equals_full_recompute(drafter):
    rows, anchor = features(1, 17), torch.tensor([5])
    cache = drafter.new_cache(num_slots=3, max_len=32)
    for start, stop in ((0, 6), (6, 7), (7, 7), (7, 12), (12, 17)):
        drafter.extend_context(cache, 2, start, rows[start:stop])
        hidden = drafter.draft_block(cache, [2], [stop], anchor)
        torch.testing.assert_close(hidden, draft(drafter, rows[:stop], anchor), rtol=0, atol=1e-5)


def test_drafting_does_not_write_the_cache(drafter):
    rows = features(1, 9)
    cache = drafter.new_cache(2, 16)
    drafter.extend_context(cache, 1, 0, rows)
    before = [t.clone() for t in cache.keys + cache.values]
    drafter.draft_block(cache, [1], [9], torch.tensor([5]))
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys + cache.values, strict=True))


def test_rows_beyond_the_length_and_other_slots_are_never_read(drafter):
    rows, anchor = features(1, 9), torch.tensor([5])
    cache = drafter.new_cache(2, 16)
    for tensor in cache.keys + cache.values:
        tensor.fill_(float("nan"))
    drafter.extend_context(cache, 1, 0, rows)
    hidden = drafter.draft_block(cache, [1], [9], anchor)
    assert torch.equal(hidden, draft(drafter, rows, anchor))


def test_training_blocks_equal_drafted_blocks(drafter):
    ids, rows, anchors, keep = training_inputs()
    hidden = drafter.training_blocks(ids, rows, anchors, keep)
    assert hidden.shape == (2, 4, drafter.config.block_size, HIDDEN)
    for s, n in keep.nonzero().tolist():
        anchor = int(anchors[s, n])
        single = draft(drafter, rows[s, :anchor], ids[s, anchor])
        torch.testing.assert_close(hidden[s, n], single[0], rtol=0, atol=1e-5)


def test_blocks_in_chunks_equal_blocks_at_once_with_their_gradients(drafter, monkeypatch):
    inputs = training_inputs()
    results = []
    for limit in (attention.MAX_SCORES, 1):
        monkeypatch.setattr(attention, "MAX_SCORES", limit)
        drafter.zero_grad()
        hidden = drafter.training_blocks(*inputs)
        hidden.square().sum().backward()
        results.append((hidden.detach(), drafter.fc.weight.grad.clone()))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-5, atol=1e-5)


def test_batch_of_requests_equals_single_requests(drafter):
    cache = drafter.new_cache(4, 32)
    lengths, slots, tokens = [0, 11, 3], [3, 0, 2], torch.tensor([7, 8, 9])
    rows = [features(10 + i, n) for i, n in enumerate(lengths)]
    drafter.extend_contexts(cache, slots, [0, 0, 0], lengths, torch.cat(rows))
    hidden = drafter.draft_block(cache, slots, lengths, tokens)
    for i, row in enumerate(rows):
        single = draft(drafter, row, tokens[i])
        torch.testing.assert_close(hidden[i], single[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["features", "input_ids"])
def test_context_from_the_anchor_on_does_not_affect_a_block(drafter, name):
    ids, rows, anchors, keep = training_inputs()
    before = drafter.training_blocks(ids, rows, anchors, keep)
    start = 4
    if name == "features":
        # The anchor's own feature row does not exist yet when its block is drafted.
        rows = rows.clone()
        rows[0, start:] += 1.0
    else:
        ids = ids.clone()
        ids[0, start + 1 :] = (ids[0, start + 1 :] + 1) % (VOCAB - 1)
    after = drafter.training_blocks(ids, rows, anchors, keep)
    assert torch.equal(before[0, :2], after[0, :2])
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[0, 2], after[0, 2])


def test_every_context_row_before_the_anchor_matters(drafter):
    rows, anchor = features(2, 6), torch.tensor(4)
    before = draft(drafter, rows, anchor)
    for position in range(6):
        changed = rows.clone()
        changed[position] += 1.0
        assert not torch.allclose(before, draft(drafter, changed, anchor)), position


def test_other_blocks_do_not_affect_a_block(drafter):
    ids, rows, anchors, keep = training_inputs()
    before = drafter.training_blocks(ids, rows, anchors, keep)
    moved = anchors.clone()
    moved[0, 1] = 20
    after = drafter.training_blocks(ids, rows, moved, keep)
    same = torch.tensor([0, 2, 3])
    assert torch.equal(before[0, same], after[0, same])
    assert not torch.allclose(before[0, 1], after[0, 1])


def test_dummy_blocks_are_finite_and_see_nothing(drafter):
    ids, rows, anchors, keep = training_inputs()
    keep[0] = False
    anchors[0] = torch.tensor([5, -1, 10_000, 3])
    hidden = drafter.training_blocks(ids, rows, anchors, keep)
    assert hidden.isfinite().all()
    changed = torch.cat((rows[:1] + 1.0, rows[1:]))
    assert torch.equal(hidden, drafter.training_blocks(ids, changed, anchors, keep))
    hidden.sum().backward()
    assert all(p.grad.isfinite().all() for p in drafter.parameters() if p.grad is not None)


def test_attention_within_a_block_is_bidirectional(drafter):
    """The last slot's input reaches every slot's output, and the first slot's too."""
    rows = features(2, 6)
    inputs = drafter._embed_blocks(torch.tensor([4])).detach()
    outputs = []
    for slot in (None, 0, drafter.config.num_slots - 1):
        changed = inputs.clone()
        if slot is not None:
            changed[:, slot] += 1.0
        drafter._embed_blocks = lambda tokens, changed=changed: changed
        outputs.append(draft(drafter, rows, torch.tensor(4)))
    same, first, last = outputs
    for depth in range(drafter.config.block_size):
        assert not torch.allclose(same[:, depth], first[:, depth])
        assert not torch.allclose(same[:, depth], last[:, depth])


def test_context_rows_are_not_input_normed(drafter):
    """Changing input_layernorm leaves the context K/V as they are and changes the block."""
    rows = features(2, 6)
    caches, outputs = [], []
    for _ in range(2):
        cache = drafter.new_cache(1, 8)
        drafter.extend_context(cache, 0, 0, rows)
        caches.append(cache)
        outputs.append(drafter.draft_block(cache, [0], [6], torch.tensor([4])))
        with torch.no_grad():
            for layer in drafter.layers:
                layer.input_layernorm.weight.mul_(torch.linspace(0.2, 2.0, HIDDEN))
    for a, b in zip(
        caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True
    ):
        assert torch.equal(a, b)
    assert not torch.allclose(outputs[0], outputs[1])


def test_layout_decides_slots_and_which_of_them_predict():
    """In place: one more slot, the anchor's output unused, slot d at the same position."""
    ahead, in_place = tiny_drafter(), tiny_drafter(anchor_predicts_next=False)
    ahead.load_state_dict(in_place.state_dict())
    B = ahead.config.block_size
    assert (ahead.config.num_slots, in_place.config.num_slots) == (B, B + 1)
    longer = tiny_drafter(block_size=B + 1)
    longer.load_state_dict(in_place.state_dict())
    rows, anchor = features(4, 7), torch.tensor(3)
    slots = draft(longer, rows, anchor)
    torch.testing.assert_close(draft(in_place, rows, anchor), slots[:, 1:], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        longer.training_blocks(
            torch.full((1, 9), 3), features(4, 9)[None], torch.tensor([[7]]), torch.ones(1, 1) > 0
        )[:, 0, 1:],
        in_place.training_blocks(
            torch.full((1, 9), 3), features(4, 9)[None], torch.tensor([[7]]), torch.ones(1, 1) > 0
        )[:, 0],
        rtol=0,
        atol=1e-6,
    )


def test_mask_token_fills_the_slots_after_the_anchor(drafter):
    inputs = drafter._embed_blocks(torch.tensor([4]))
    table = drafter.embed_tokens.weight
    assert torch.equal(inputs[0, 0], table[4])
    assert torch.equal(inputs[0, 1:], table[drafter.config.mask_token_id].expand_as(inputs[0, 1:]))


@pytest.mark.parametrize("head_dim", [192, 12, 128])
def test_head_dim_sets_shapes_rotary_size_and_scale(head_dim):
    drafter = tiny_drafter(head_dim=head_dim, num_attention_heads=2, num_key_value_heads=1)
    layer = drafter.layers[0].self_attn
    assert layer.q_proj.weight.shape == (2 * head_dim, HIDDEN)
    assert layer.k_proj.weight.shape == layer.v_proj.weight.shape == (head_dim, HIDDEN)
    assert layer.o_proj.weight.shape == (HIDDEN, 2 * head_dim)
    assert layer.q_norm.weight.shape == layer.k_norm.weight.shape == (head_dim,)
    cos, _ = drafter._rotary.rows(8, torch.device("cpu"), torch.float32)
    assert cos.shape[1] == head_dim
    theta = drafter.config.rope_theta
    frequencies = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    torch.testing.assert_close(cos[5, : head_dim // 2].double(), (5 * frequencies).cos())


@pytest.mark.parametrize("head_dim", [12, 192])
def test_attention_equals_softmax_written_out(head_dim):
    """Scale head_dim ** -0.5, heads of a group share K and V, context and block in one softmax."""
    torch.manual_seed(0)
    R, W, Hq, Hkv, n = 1, 3, 4, 2, 5
    query = torch.randn(R, W, Hq, head_dim, dtype=torch.float64)
    block = [torch.randn(R, W, Hkv, head_dim, dtype=torch.float64) for _ in range(2)]
    context = [torch.randn(Hkv, n, head_dim, dtype=torch.float64) for _ in range(2)]
    expected = torch.empty_like(query)
    for head in range(Hq):
        kv = head // (Hq // Hkv)
        keys = torch.cat((context[0][kv], block[0][0, :, kv]))
        values = torch.cat((context[1][kv], block[1][0, :, kv]))
        scores = query[0, :, head] @ keys.T / head_dim**0.5
        expected[0, :, head] = torch.softmax(scores, -1) @ values
    packed = attention.packed_attention(query, tuple(block), [tuple(context)])
    torch.testing.assert_close(packed, expected)
    bias = attention.context_bias(torch.tensor([[n]]), n, W)
    rows = [c.transpose(0, 1)[None] for c in context]
    trained = attention.training_attention(
        query[:, None], tuple(b[:, None] for b in block), tuple(rows), bias
    )
    # The training softmax is float32.
    torch.testing.assert_close(trained[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_rotation_depends_on_relative_positions_only():
    table = RotaryTable(12, 1e4)
    cos, sin = table.rows(600, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    q, k = torch.randn(1, 12), torch.randn(1, 12)

    def dot(i: int, j: int) -> Tensor:
        rotated = [rotate(x, (cos[p], sin[p])) for x, p in ((q, i), (k, j))]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(dot(7, 3), dot(107, 103), rtol=1e-4, atol=1e-4)
    assert not torch.isclose(dot(7, 3), dot(7, 4), atol=1e-3)
    assert torch.equal(table.rows(5000, cos.device, cos.dtype)[0][:600], cos[:600])


def test_bfloat16_drafter_stays_near_float32():
    """bf16 has 8 bits: after 3 layers and a final norm 5 % of the largest value is its noise."""
    drafter = tiny_drafter()
    rows, anchor = features(1, 9), torch.tensor(5)
    expected = draft(drafter, rows, anchor)
    low = tiny_drafter().to(torch.bfloat16)
    hidden = draft(low, rows, anchor)
    assert hidden.dtype == torch.bfloat16
    logits = low.base_logits(hidden)
    assert logits.dtype == torch.float32
    assert (hidden.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_float32_backbone_works_with_a_bfloat16_target():
    """Training keeps the target's tables in their own dtype and the drafter in float32."""
    config = tiny_config()
    table = torch.randn(VOCAB, HIDDEN).bfloat16()
    drafter = TreeSparkDrafter.init_from_target(config, table, table)
    hidden = drafter.training_blocks(
        torch.ones(1, 6, dtype=torch.long),
        features(0, 1, 6).bfloat16(),
        torch.tensor([[2]]),
        torch.tensor([[True]]),
    )
    assert hidden.dtype == torch.float32
    drafter.base_logits(hidden).sum().backward()
    assert drafter.fc.weight.grad is not None


def test_cache_refuses_rows_past_its_end():
    cache = DraftCache(tiny_config(), 1, 4, "cpu", torch.float32)
    rows = torch.zeros(3, 2, 12)
    with pytest.raises(AssertionError, match="rows"):
        cache.write(0, 0, 2, rows, rows)
    with pytest.raises(AssertionError, match="rows"):
        cache.view(0, 0, 5)
    assert cache.num_bytes() == 3 * 2 * 2 * 4 * 12 * 4
