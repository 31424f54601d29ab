# SPDX-License-Identifier: Apache-2.0
"""The drafter reproduces the golden DeepSpec cases: training, losses, gradients, inference.

Tolerance 1e-4 relative to the largest value, from the fixtures' own description (float32, another
order of additions). Token ids are compared exactly.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.drafter.helpers import ParityCase, load_case

# Depth decay and loss weights of the reference runs.
GAMMA, CE_WEIGHT, L1_WEIGHT = 4.0, 0.1, 0.9


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One run of every test per folder below dspark_parity/."""
    root = Path(metafunc.config.getoption("--fixtures")) / "dspark_parity"
    folders = sorted(p for p in root.iterdir() if (p / "config.json").exists())
    assert folders, f"no cases below {root}"
    metafunc.parametrize("case", folders, ids=lambda p: p.name, indirect=True)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> ParityCase:
    """The folder's drafter and tensors."""
    return load_case(request.param)


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare to 1e-4 of the largest expected magnitude."""
    assert actual.shape == expected.shape
    scale = expected.abs().max().item()
    assert scale > 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * scale)


def parents_of(case: ParityCase) -> Tensor:
    """Reference parents [S, A, B]: the tokens from the anchor on, clamped at the sequence end."""
    depths = torch.arange(case.drafter.config.block_size)
    ids, anchors = case["input_ids"], case["anchor_positions"]
    index = (anchors.unsqueeze(-1) + depths).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, index.flatten(1)).view_as(index)


def run_training(case: ParityCase) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return hidden, teacher-forced logits and confidence logits."""
    hidden = case.drafter.training_blocks(
        case["input_ids"], case["features"], case["anchor_positions"], case["block_keep_mask"]
    )
    parents = parents_of(case)
    logits = case.drafter.teacher_forced_logits(hidden, parents)
    if case.drafter.confidence_head is None:
        return hidden, logits, None
    return hidden, logits, case.drafter.confidence_logits(hidden, parents)


def reference_losses(case: ParityCase, logits: Tensor, kappa: Tensor | None) -> dict[str, Tensor]:
    """CE, raw L1 and confidence loss by their formulas, written out for small shapes."""
    mask = case["out_eval_mask"]
    depths = torch.arange(mask.shape[-1])
    weights = mask * torch.exp(-depths / GAMMA)
    log_q = torch.log_softmax(logits, -1)
    picked = log_q.gather(-1, case["out_target_ids"].clamp(min=0).unsqueeze(-1)).squeeze(-1)
    distance = (log_q.exp() - torch.softmax(case["out_teacher_logits"], -1)).abs().sum(-1)
    terms = {"ce": -picked, "l1": distance}
    if kappa is not None:
        overlap = (1 - distance / 2).clamp(0, 1).detach()
        terms["conf"] = nn.functional.binary_cross_entropy_with_logits(
            kappa, overlap, reduction="none"
        )
    losses = {
        name: torch.where(mask, term * weights, 0).sum() / weights.sum()
        for name, term in terms.items()
    }
    losses["base"] = CE_WEIGHT * losses["ce"] + L1_WEIGHT * losses["l1"]
    if kappa is not None:
        losses["base"] = losses["base"] + losses["conf"]
    return losses


def test_training_logits_match_the_reference(case):
    hidden, logits, kappa = run_training(case)
    mask = case["out_eval_mask"]
    assert mask.any()
    assert not mask.all()
    assert hidden.isfinite().all()
    assert logits.isfinite().all()
    close(logits[mask], case["out_draft_logits"][mask])
    if kappa is not None:
        close(kappa[mask], case["out_confidence_logits"][mask])


def test_teacher_logits_come_from_the_same_head(case):
    index = case["anchor_positions"].unsqueeze(-1) + torch.arange(case.drafter.config.block_size)
    last_hidden = case["target_last_hidden"]
    index = index.clamp(max=last_hidden.shape[1] - 1)
    rows = torch.stack([h[i] for h, i in zip(last_hidden, index, strict=True)])
    mask = case["out_eval_mask"]
    close(case.drafter.base_logits(rows)[mask], case["out_teacher_logits"][mask])


def test_losses_match_the_reference(case):
    _, logits, kappa = run_training(case)
    losses = reference_losses(case, logits, kappa)
    for name, expected in case.losses.items():
        assert losses[name].item() == pytest.approx(expected, rel=1e-4), name


def test_gradients_of_the_base_loss_match_the_reference(case):
    names = [n for n in case.tensors if n.startswith("grad.")]
    _, logits, kappa = run_training(case)
    reference_losses(case, logits, kappa)["base"].backward()
    parameters = dict(case.drafter.named_parameters())
    for name in names:
        gradient = parameters[name.removeprefix("grad.")].grad
        assert gradient is not None, name
        close(gradient, case[name])
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    assert parameters["embed_tokens.weight"].grad is None
    assert parameters["lm_head.weight"].grad is None


def test_inference_round_matches_the_reference(case):
    drafter, length = case.drafter, int(case["inf_context_len"])
    anchor = case["inf_anchor_token"]
    cache = drafter.new_cache(num_slots=3, max_len=length + 5)
    # The context arrives in two parts, as after a prefill in chunks.
    half = length // 2
    drafter.extend_context(cache, 1, 0, case["features"][0, :half])
    drafter.extend_context(cache, 1, half, case["features"][0, half:length])
    hidden = drafter.draft_block(cache, [1], [length], anchor)
    close(hidden, case["inf_hidden"])
    close(drafter.base_logits(hidden), case["inf_base_logits"])
    tokens, logits = drafter.chain(hidden, anchor)
    assert torch.equal(tokens, case["inf_chain_tokens"])
    close(logits, case["inf_chain_logits"])
    if drafter.confidence_head is not None:
        parents = torch.cat((anchor.unsqueeze(1), tokens[:, :-1]), 1)
        kappa = drafter.confidence_logits(hidden, parents)
        close(kappa, case["inf_chain_confidence_logits"])
