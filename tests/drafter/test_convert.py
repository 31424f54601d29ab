# SPDX-License-Identifier: Apache-2.0
"""Any layout to any other and back: the same drafter, bit for bit, or a refusal by field."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafter.foreign import LAYOUTS, MAKER, foreign_target, load, make
from tests.drafter.helpers import edit_config, tiny_drafter, tiny_target
from tests.drafter.test_eagle3 import golden_folders, load_golden, tiny_eagle3
from treespark import cli
from treespark.drafter.convert import FORMATS, convert
from treespark.drafter.loading import FROZEN_KEYS, TargetWeights
from treespark.errors import UsageError

ROOT = Path(__file__).parents[2]
# What each layout can be written as, ours always. The rest is refused by the field named.
WRITTEN = {
    "deepspec-dspark": ("deepspec", "speculators"),
    "deepspec-dflash": ("deepspec", "speculators"),
    "deepspec-eagle3": ("deepspec", "speculators"),
    "zlab-dflash": ("dflash", "speculators"),
    "specforge-dflash": ("dflash", "speculators"),
    "specforge-dspark": ("deepspec", "speculators"),
    "specforge-eagle3": ("eagle3", "speculators"),
    "specforge-eagle3-whole": ("eagle3", "speculators"),
    "speculators-eagle3": ("speculators",),
    "speculators-dflash": ("dflash", "speculators"),
    "speculators-dspark": ("deepspec", "speculators"),
}
FIELDS = "anchor_predicts_next|markov_rank|model_type|qk_norm|norm_before_residual|draft_vocab_size"


def its_target(folder: Path) -> TargetWeights:
    """A target whose tables are those in the folder, where it has any of a target."""
    target, stored = foreign_target(), load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    embed = stored.get("embed_tokens.weight", target.embed_weight)
    # The head of other EAGLE-3 folders is the drafter's own.
    is_targets = raw["architectures"][0].startswith("Qwen3")
    head = stored["lm_head.weight"] if is_targets else target.head_weight
    return TargetWeights(embed, head, None, 8)


def same(a, b) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    skipped = {"tree", "num_anchors", "step_loss_decay", "initializer_range"}
    fields = {k: v for k, v in a.config.to_dict().items() if k not in skipped}
    if "eagle3" in a.config.model_type:
        # SpecForge's layout does not say how many steps.
        fields.pop("block_size")
    found = b.config.to_dict()
    assert {k: found[k] for k in fields} == fields


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_becomes_every_other_that_can_hold_it_and_is_the_same_drafter(tmp_path, layout):
    source = make(layout, tmp_path / "source")
    target = its_target(source)
    original = load(source, target)
    for to in FORMATS:
        out = tmp_path / to
        if to not in ("treespark", *WRITTEN[layout]):
            with pytest.raises(UsageError, match=FIELDS):
                convert(source, out, to, target, verifier="org/target")
            assert not out.exists()
            continue
        convert(source, out, to, target, verifier="org/target")
        same(load(out, target), original)
        convert(out, tmp_path / f"{to}-own", "treespark", target)
        same(load(tmp_path / f"{to}-own", target), original)


@pytest.mark.parametrize("layout", ["zlab-dflash", "specforge-eagle3", "deepspec-dspark"])
def test_the_way_back_gives_the_folders_own_tensors_and_fields(tmp_path, layout):
    source = make(layout, tmp_path / "source")
    target = its_target(source)
    to = WRITTEN[layout][0]
    convert(source, tmp_path / "own", "treespark", target)
    convert(tmp_path / "own", tmp_path / "back", to, target)
    left, right = (load_file(tmp_path / n / "model.safetensors") for n in ("source", "back"))
    added = {"embed_tokens.weight"} if to == "eagle3" else set()
    assert right.keys() - added == left.keys()
    assert all(torch.equal(left[key], right[key]) for key in left)
    raw, back = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("source", "back"))
    # Ours says of every layer what theirs leaves to defaults.
    skipped = {"rope_scaling", "model_type"} if to == "eagle3" else {"rope_scaling"}
    assert {k: back[k] for k in raw.keys() - skipped} == {k: raw[k] for k in raw.keys() - skipped}


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "dflash_block7"])
def test_golden_block_drafters_pass_through_every_layout_bit_for_bit(fixtures_dir, tmp_path, name):
    source = fixtures_dir / "dspark_parity" / name
    original = load_file(source / "model.safetensors")
    target = TargetWeights(*(original[key] for key in FROZEN_KEYS), None, 8)
    convert(source, tmp_path / "own", "treespark", target)
    convert(tmp_path / "own", tmp_path / "theirs", "speculators", target, verifier="t")
    convert(tmp_path / "theirs", tmp_path / "back", "deepspec", target)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert original.keys() == back.keys()
    assert all(torch.equal(original[key], back[key]) for key in original)


def test_golden_eagle3_drafters_pass_through_every_layout_bit_for_bit(fixtures_dir, tmp_path):
    for number, source in enumerate(golden_folders(fixtures_dir)):
        original = load_file(source / "model.safetensors")
        depth = load_golden(source).config.num_target_layers
        target = TargetWeights(*(original[key] for key in FROZEN_KEYS), None, depth)
        work = tmp_path / str(number)
        convert(source, work / "own", "treespark", target)
        convert(work / "own", work / "back", "deepspec", target)
        back = load_file(work / "back" / "model.safetensors")
        assert original.keys() == back.keys()
        assert all(torch.equal(original[key], back[key]) for key in original)


def test_servers_find_the_keys_that_they_document(tmp_path):
    target = tiny_target()
    served = tiny_eagle3(qk_norm=False)
    served.save_pretrained(tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "eagle3", "eagle3", target)
    raw = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["draft_vocab_size"] == raw["vocab_size"] == 97
    # SGLang counts the layers that give a tap, vLLM those that read it.
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    keys = load_file(tmp_path / "eagle3" / "model.safetensors").keys()
    assert {"midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "lm_head.weight"} < keys
    tiny_drafter(anchor_predicts_next=False).save_pretrained(tmp_path / "block")
    convert(tmp_path / "block", tmp_path / "s", "speculators", target, verifier="org/target")
    raw = json.loads((tmp_path / "s" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dspark"
    assert (raw["block_size"], raw["sample_from_anchor"]) == (6, False)
    assert raw["aux_hidden_state_layer_ids"] == [2, 4, 6]
    spec = raw["speculators_config"]
    assert spec["verifier"]["name_or_path"] == "org/target"
    assert spec["proposal_methods"][0]["speculative_tokens"] == 5
    assert not load_file(tmp_path / "s" / "model.safetensors").keys() & set(FROZEN_KEYS)


def test_what_a_format_would_lose_is_refused(tmp_path):
    source = make("deepspec-dspark", tmp_path / "source")
    with pytest.raises(UsageError, match="--to treespark: needs --target"):
        convert(source, tmp_path / "out", "treespark")
    with pytest.raises(UsageError, match=r"embed_tokens\.weight is not the target's"):
        convert(source, tmp_path / "out", "treespark", foreign_target())
    with pytest.raises(UsageError, match="--to speculators: needs --verifier"):
        convert(source, tmp_path / "out", "speculators", its_target(source))
    with pytest.raises(UsageError, match="--to gguf: allowed: treespark, deepspec"):
        convert(source, tmp_path / "out", "gguf")
    with pytest.raises(UsageError, match="is the drafter that is exported"):
        convert(source, source, "deepspec")
    judge = tiny_drafter(
        anchor_predicts_next=False, markov_rank=0, confidence_head_with_markov=False
    )
    judge.save_pretrained(tmp_path / "judge")
    with pytest.raises(UsageError, match="enable_confidence_head is True: --to dflash"):
        convert(tmp_path / "judge", tmp_path / "out", "dflash", tiny_target())
    five = tiny_eagle3(qk_norm=False, target_layer_ids=[1, 2, 3, 4, 5])
    five.save_pretrained(tmp_path / "five")
    with pytest.raises(UsageError, match=r"target_layer_ids is \[1, 2, 3, 4, 5\]: .* 3 layers"):
        convert(tmp_path / "five", tmp_path / "out", "eagle3", tiny_target())
    assert not (tmp_path / "out").exists()


def test_every_tensor_keeps_its_dtype(tmp_path):
    source = make("specforge-eagle3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors = {k: t.bfloat16() if "mlp" in k else t for k, t in tensors.items()}
    save_file(tensors, source / "model.safetensors")
    convert(source, tmp_path / "out", "treespark", its_target(source))
    out = load_file(tmp_path / "out" / "model.safetensors")
    found = {k: t.dtype for k, t in out.items()}
    assert found["layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert found["fc.weight"] == torch.float32
    assert found["d2t"] == torch.int64


# ------------------------------------------------------------------ commands


def write_target(folder: Path, tables: TargetWeights) -> Path:
    """A target folder with these tables."""
    vocab_size, hidden_size = tables.embed_weight.shape
    tool("make_tiny_models").make_tiny_model(
        "qwen3",
        folder,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=tables.num_layers,
        tie_word_embeddings=False,
    )
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = tables.embed_weight
    weights["lm_head.weight"] = tables.head_weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def run(monkeypatch, capsys, main, *args) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, args)])
    try:
        code = main()
    except SystemExit as stopped:
        code = stopped.code
    out = capsys.readouterr()
    return code or 0, out.out, out.err


def tool(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_and_the_verb_convert_alike_and_run_no_code(tmp_path, monkeypatch, capsys):
    target = write_target(tmp_path / "target", foreign_target())
    MAKER.make_tiny_drafter("zlab-dflash", tmp_path / "zlab", MAKER.Maker())
    (tmp_path / "zlab" / "dflash.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    args = (tmp_path / "zlab", tmp_path / "own", "--to", "treespark", "--target", target)
    capsys.readouterr()
    assert run(monkeypatch, capsys, tool("convert_checkpoint").main, *args) == (
        0,
        f"{tmp_path / 'own'}\n",
        "",
    )
    args = ("export", tmp_path / "own", "--target", target, "--out", tmp_path / "s")
    code, out, _ = run(monkeypatch, capsys, cli.main, *args, "--to", "speculators")
    assert (code, out) == (0, f"{tmp_path / 's'}\n")
    raw = json.loads((tmp_path / "s" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert not (tmp_path / "canary").exists()
    args = (tmp_path / "own", tmp_path / "x", "--to", "deepspec", "--target", target)
    code, _, err = run(monkeypatch, capsys, tool("convert_checkpoint").main, *args)
    assert code == 2
    assert err.startswith("error: anchor_predicts_next is false")
    assert err.count("\n") == 1


def test_what_the_tools_make_fits_together_as_the_document_says(tmp_path, monkeypatch, capsys):
    models = tool("make_tiny_models").main
    args = (tmp_path, "--family", "llama", "--layers", 8)
    assert run(monkeypatch, capsys, models, *args)[:2] == (0, f"{tmp_path / 'tiny-llama'}\n")
    code, _, err = run(monkeypatch, capsys, models, tmp_path, "--layers", 0)
    assert (code, "--layers 0: need at least 1" in err) == (2, True)
    args = (tmp_path / "drafters", "--layout", *LAYOUTS)
    assert run(monkeypatch, capsys, MAKER.main, *args)[0] == 0
    for layout in LAYOUTS:
        args = ("drafter", "inspect", tmp_path / "drafters" / layout)
        args = (*args, "--target", tmp_path / "tiny-llama")
        assert run(monkeypatch, capsys, cli.main, *args)[0] == 0, layout
    args = (tmp_path / "drafters", "--layout", "zlab-dflash")
    code, _, err = run(monkeypatch, capsys, MAKER.main, *args)
    assert (code, "zlab-dflash is there already" in err) == (2, True)


def test_inspect_says_what_a_folder_is_and_whether_it_fits(tmp_path, monkeypatch, capsys):
    target = write_target(tmp_path / "target", foreign_target())
    MAKER.make_tiny_drafter("zlab-dflash", tmp_path / "zlab", MAKER.Maker())
    args = ("drafter", "inspect", tmp_path / "zlab", "--target", target)
    code, out, _ = run(monkeypatch, capsys, cli.main, *args)
    assert code == 0
    for words in (
        "z-lab or SpecForge DFlash",
        "5 drafted tokens a block, the anchor not counted; in place",
        "target layers [1, 3, 5] of 8",
        "272 tokens",
        "271",
        "never run",
        "no record",
        "fits            yes",
    ):
        assert words in out
    edit_config(tmp_path / "zlab", lambda raw: raw.update(num_target_layers=9))
    code, out, _ = run(monkeypatch, capsys, cli.main, *args, "--json")
    facts = json.loads(out)
    assert code == 1
    assert facts["misfits"] == ["num_target_layers: the drafter has 9, the target 8"]
    assert (facts["block_size"], facts["mask_token_id"]) == (5, 271)
    drafter = load(make("zlab-dflash", tmp_path / "again"))
    own = (p.numel() for n, p in drafter.named_parameters() if n not in FROZEN_KEYS)
    assert facts["parameters"] == sum(own)
    code, _, err = run(monkeypatch, capsys, cli.main, "drafter", "inspect", target)
    assert code == 2
    assert "architectures is ['Qwen3ForCausalLM']" in err


NAMES = {
    "deepspec-dspark": "DeepSpec DSpark or DFlash",
    "deepspec-dflash": "DeepSpec DSpark or DFlash",
    "deepspec-eagle3": "DeepSpec EAGLE-3",
    "zlab-dflash": "z-lab or SpecForge DFlash",
    "specforge-dflash": "z-lab or SpecForge DFlash",
    "specforge-dspark": "SpecForge DSpark",
    "specforge-eagle3": "SpecForge EAGLE-3",
    "specforge-eagle3-whole": "SpecForge EAGLE-3",
    "speculators-eagle3": "speculators",
    "speculators-dflash": "speculators",
    "speculators-dspark": "speculators",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_reads_every_layout(tmp_path, monkeypatch, capsys, layout):
    MAKER.make_tiny_drafter(layout, tmp_path / "d", MAKER.Maker())
    edit_config(tmp_path / "d", lambda raw: raw.update(num_target_layers=8))
    code, out, _ = run(
        monkeypatch, capsys, cli.main, "drafter", "inspect", tmp_path / "d", "--json"
    )
    facts = json.loads(out)
    assert code == 0
    assert facts["misfits"] is None
    assert facts["layout"] == NAMES[layout]
    rows = MAKER.REDUCED if layout in ("specforge-eagle3", "speculators-eagle3") else 272
    assert facts["head_rows"] == rows
