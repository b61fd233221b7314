from typing import TypeAlias

import numpy as np
import numpy.typing as npt

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Numbers: TypeAlias = npt.NDArray[np.int64]

def copy_runs(
    target: _Bytes,
    source: _Bytes,
    target_offsets: _Numbers,
    source_offsets: _Numbers,
    lengths: _Numbers,
    how: str | None = None,
) -> None: ...
def best() -> str: ...
