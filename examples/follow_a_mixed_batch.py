"""One step, followed through: A prefills 8 rows while B decodes, on TP2 x PCP2 with DCP4.

Prints what each rank computes, what it stores and what it may read. Rows computed and tokens stored
differ on every rank: that is the whole point. Nothing is started, and no weights are needed.
"""

from __future__ import annotations

from heddle.layout.kv import KVLayout
from heddle.layout.mesh import Mesh
from heddle.layout.rows import RowClass, RowRequest, create_row_layout

# A is fresh: 8 rows from position 0, block 3. B decodes: one row at position 11, block 5.
MESH = Mesh(tp_size=2, pcp_size=2, dcp_size=4)
STORED = KVLayout(world_size=4, interleave_size=2, block_size=4)
COMPUTED = create_row_layout(
    [RowRequest(8, RowClass.SPLIT), RowRequest(1, RowClass.COPY)], MESH.pcp_size
)
POSITIONS = {"A": range(8), "B": range(11, 12)}
BLOCK_TABLES = {"A": [3], "B": [5]}
NAMES = [("A", position) for position in POSITIONS["A"]] + [("B", 11)]


def main() -> None:
    print(f"DCP group, in order: {MESH.groups('dcp')[0]}")
    for rank in MESH.groups("dcp")[0]:
        place, coord = MESH.position("dcp", rank), MESH.coord_of(rank)
        rows = [NAMES[row] for row in COMPUTED.local_rows(coord.pcp)]
        print(f"R{rank}: place {place}, pcp {coord.pcp}, tp {coord.tp}")
        print(f"  computes {' '.join(name if name == 'B' else f'A{row}' for name, row in rows)}")
        for name, positions in POSITIONS.items():
            slots = {p: STORED.slot(p, BLOCK_TABLES[name], place) for p in positions}
            stored = {p: slot for p, slot in slots.items() if slot >= 0}
            length = positions[-1] + 1
            print(f"  stores of {name}: {stored}, then keeps {STORED.local_len(length, place)}")
        print(f"  B reads {STORED.visible_len(11, place)} keys here, then states are merged")
    # Order is restored from canonical copies: B comes from PCP rank 0, the other copy is unused.
    print(f"restore_index: {COMPUTED.restore.tolist()}")


if __name__ == "__main__":
    main()
