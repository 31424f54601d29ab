# SPDX-License-Identifier: Apache-2.0
"""Tree speculative decoding over block drafters.

The public names are imported on first use, so that `import treespark` does not load torch.
"""

import importlib
import os
from typing import Any

__version__ = "0.1.0"

# An NPU plug-in without its driver libraries registers itself with torch and makes `import torch`
# raise. device.py imports it itself, guarded; torch has to be told before its first import.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

_PUBLIC = {
    "LLM": "treespark.serving.llm",
    "SamplingParams": "treespark.serving.llm",
    "TreePolicy": "treespark.tree.policy",
    "TreeSparkConfig": "treespark.drafter.config",
    "TreeSparkDrafter": "treespark.drafter.modeling",
}
__all__ = [
    "LLM",
    "SamplingParams",
    "TreePolicy",
    "TreeSparkConfig",
    "TreeSparkDrafter",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The public object `name`, from the module that defines it."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """The public names, loaded or not."""
    return sorted({*globals(), *_PUBLIC})
