"""What the Zero Bubble paper measured and computed (ICLR 2024, arXiv 2401.10241)."""

from __future__ import annotations

from megatron_zbpp.planning.costs import Costs

# Tables 3 and 6, and the bubble rates of table 5.
# p, m, T_F, T_B, T_W, T_comm, 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
TABLE_5 = (
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083, 0.1585, 0.0433),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837, 0.1242, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698, 0.1323, 0.0029),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898, 0.1045, 0.0559, 0.1045, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091, 0.0554, 0.0294, 0.0554, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672, 0.1397, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.2082, 0.1088, 0.0516, 0.1088, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251, 0.0576, 0.0266, 0.0576, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641, 0.1421, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168, 0.1106, 0.0490, 0.1106, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257, 0.0594, 0.0018),
)
# By row / 3: layers per stage, batch, heads, hidden; the sequence is 1024 throughout.
MODELS = ((3, 6, 24, 2304), (4, 3, 32, 4096), (3, 1, 40, 5120), (2, 1, 48, 6144))


def paper_costs(row: int) -> Costs:
    """Times of table 6; M_B = sb(34h+5as) and M_W = 32sbh bytes a layer (table 1)."""
    p, _, forward, backward, weight, comm = TABLE_5[row][:6]
    layers, b, a, h = MODELS[row // 3]
    m_b, m_w = layers * 1024 * b * (34 * h + 5 * a * 1024), layers * 32 * 1024 * b * h
    times = ((time,) * p for time in (forward, backward, weight))
    return Costs(*times, comm, activation=(m_b,) * p, retained=(m_w,) * p)
