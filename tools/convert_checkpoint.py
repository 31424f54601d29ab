# SPDX-License-Identifier: Apache-2.0
"""Convert a drafter between the layouts of treespark, DeepSpec, z-lab, SpecForge and speculators.

    python tools/convert_checkpoint.py SOURCE OUT --to FORMAT [--target DIR] [--verifier NAME]

SOURCE is a drafter folder of any of them; only JSON and safetensors are read, and no code in it is
run. FORMAT is treespark (ours), deepspec (vLLM's and SGLang's DSpark), dflash (z-lab's, in place),
eagle3 (SpecForge's, for SGLang and vLLM) or speculators (for vLLM). --target is the target's
folder: it supplies the embedding and head that most layouts leave out. The same, with a target, is
`treespark export`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from treespark.bench.drafter_folders import target_weights
from treespark.drafter.convert import FORMATS, convert
from treespark.errors import UsageError


def main() -> int:
    """Convert, and print where to; a mistake of the user is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SOURCE")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--to", choices=sorted(FORMATS), required=True)
    parser.add_argument("--target", type=Path, help="folder of the target")
    parser.add_argument("--verifier", help="target's name in a speculators config")
    args = parser.parse_args()
    try:
        target = None if args.target is None else target_weights(args.target)
        verifier = args.verifier or ("" if args.target is None else str(args.target))
        convert(args.source, args.out, args.to, target, verifier=verifier)
    except UsageError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return 2
    print(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
