# SPDX-License-Identifier: Apache-2.0
"""Sizes in bytes, as people write them and as they read them."""

import re

_UNITS = {"M": 20, "G": 30, "T": 40}


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 64G or 1.5T; powers of 1024. Raises ValueError saying what it needs.

    As many digits as any machine needs; also no exponents, infinities or signs.
    """
    number, unit = text[:-1], text[-1:].upper()
    if unit not in _UNITS or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", number):
        raise ValueError("need a size as 64G or 1.5T (units M, G, T)")
    return int(float(number) * (1 << _UNITS[unit]))


def readable(count: float) -> str:
    """A number of bytes in MB, GB or TB; powers of 1000, as disks are sold."""
    for unit, size in (("TB", 1e12), ("GB", 1e9)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e6:.1f} MB"
