"""Writes codebooks.bin, the grids of the IQ formats, and codebooks.bin.sha256 beside it.

The grids come from the package `gguf` (0.19.0, MIT; notice in LICENSE-gguf). Each entry is 8 (4 for IQ3) signed
bytes; the grids follow each other in the order of GRIDS.

Usage: pip install gguf==0.19.0 && python generate.py
"""

import hashlib
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import quants

GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]
VERSION = "0.19.0"


def grid(name: str) -> bytes:
    cls = getattr(quants, name)
    cls.init_grid()
    values = np.asarray(cls.grid).reshape(cls.grid_shape)
    assert np.array_equal(values, np.rint(values)) and np.abs(values).max() < 128
    return values.astype(np.int8).tobytes()


def main() -> None:
    assert version("gguf") == VERSION, f"needs gguf {VERSION}"
    data = b"".join(grid(name) for name in GRIDS)
    path = Path(__file__).with_name("codebooks.bin")
    path.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    path.with_name(f"{path.name}.sha256").write_text(f"{digest}  {path.name}\n")


if __name__ == "__main__":
    main()
