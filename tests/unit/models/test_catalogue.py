from __future__ import annotations

import numpy as np
import pytest

from engine.models.catalogue import ItemLookup


@pytest.mark.parametrize("scale", [1, 10**12])
def test_rows_of_known_and_unknown_ids(scale: int) -> None:
    lookup = ItemLookup(np.array([7, 3, 11]) * scale, first_row=2)
    asked = np.array([3, 11, 7, 0, 4, 12, 3, 2**62]) * np.array([scale] * 7 + [1])
    assert lookup.rows(asked).tolist() == [3, 4, 2, -1, -1, -1, 3, -1]
    assert lookup.rows(asked[:0]).tolist() == []
