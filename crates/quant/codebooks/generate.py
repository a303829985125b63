"""Writes codebooks.bin, the grids of the IQ formats, from the package `gguf` (0.19.0, MIT).

Each grid entry is 8 (or 4, for IQ3) signed bytes; the grids follow each other in the order of GRIDS.
Usage: python generate.py codebooks.bin
"""

import hashlib
import sys

import numpy as np
from gguf import quants

GRIDS = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]


def grid(name: str) -> bytes:
    cls = getattr(quants, name)
    cls.init_grid()
    values = np.asarray(cls.grid).reshape(cls.grid_shape)
    assert np.array_equal(values, np.rint(values)) and np.abs(values).max() < 128
    return values.astype(np.int8).tobytes()


data = b"".join(grid(name) for name in GRIDS)
with open(sys.argv[1], "wb") as file:
    file.write(data)
print(len(data), hashlib.sha256(data).hexdigest())
