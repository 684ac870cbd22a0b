"""What the papers print: Zero Bubble, ICLR 2024, and its longer version, arXiv 2401.10241.

Throughput is in samples per GPU and second, memory in GB, times in ms.
"""

from __future__ import annotations

from typing import NamedTuple


class Model(NamedTuple):
    """A row of Table 3. The first and the last stage have one layer fewer than the others."""

    name: str
    layers: int  # of a stage
    heads: int
    hidden: int
    num_ranks: int
    batch: int  # samples of a microbatch


SEQUENCE = 1024
MODELS = (
    Model('1.5B', 3, 24, 2304, 8, 6),
    Model('6.2B', 4, 32, 4096, 8, 3),
    Model('14.6B', 3, 40, 5120, 16, 1),
    Model('28.3B', 2, 48, 6144, 32, 1),
)
MICROBATCHES = ((24, 32, 64), (24, 32, 64), (48, 64, 128), (96, 128, 256))  # of each model

# Table 6 (arXiv: Table 9), by model and number of microbatches: T_F, T_B, T_W, T_comm.
PASS_TIMES = (
    (
        (18.522, 18.086, 9.337, 0.601),
        (18.513, 18.086, 9.331, 0.626),
        (18.546, 18.097, 9.321, 0.762),
    ),
    (
        (29.718, 29.444, 19.927, 0.527),
        (29.802, 29.428, 19.530, 0.577),
        (29.935, 29.621, 19.388, 0.535),
    ),
    (
        (11.347, 11.248, 8.132, 0.377),
        (11.307, 11.254, 8.101, 0.379),
        (11.325, 11.308, 8.109, 0.378),
    ),
    (
        (10.419, 10.207, 7.715, 0.408),
        (10.408, 10.204, 7.703, 0.408),
        (10.402, 10.248, 7.698, 0.460),
    ),
)

# Table 5: bubble rates, which the paper computed; by schedule, model and microbatches.
BUBBLE_RATES = {
    '1f1b': (
        (0.2431, 0.1985, 0.1240),
        (0.2347, 0.1898, 0.1091),
        (0.2552, 0.2082, 0.1251),
        (0.2646, 0.2168, 0.1352),
    ),
    'interleaved': (
        (0.1055, 0.0818, 0.0443),
        (0.0808, 0.0628, 0.0320),
        (0.1104, 0.0852, 0.0445),
        (0.1493, 0.1164, 0.0624),
    ),
    'zb-h1': (
        (0.1585, 0.1242, 0.0674),
        (0.1323, 0.1045, 0.0554),
        (0.1397, 0.1088, 0.0576),
        (0.1421, 0.1106, 0.0594),
    ),
    'zb-h2': (
        (0.1083, 0.0837, 0.0444),
        (0.0698, 0.0559, 0.0294),
        (0.0672, 0.0516, 0.0266),
        (0.0641, 0.0490, 0.0257),
    ),
    'zb-1p': (
        (0.1585, 0.1242, 0.0674),
        (0.1323, 0.1045, 0.0554),
        (0.1397, 0.1088, 0.0576),
        (0.1421, 0.1106, 0.0594),
    ),
    'zb-2p': (
        (0.0433, 0.0039, 0.0026),
        (0.0029, 0.0022, 0.0010),
        (0.0066, 0.0054, 0.0028),
        (0.0038, 0.0029, 0.0018),
    ),
}

# Table 4: throughput by schedule, model and microbatches; memory by schedule and model.
THROUGHPUT = {
    '1f1b': ((11.8, 12.5, 13.6), (3.50, 3.70, 4.03), (1.40, 1.49, 1.64), (0.76, 0.80, 0.88)),
    'interleaved': (
        (13.1, 13.4, 13.9),
        (4.01, 4.08, 4.19),
        (1.54, 1.59, 1.66),
        (0.82, 0.85, 0.90),
    ),
    'zb-1p': ((12.9, 13.4, 14.2), (3.88, 4.00, 4.20), (1.61, 1.67, 1.76), (0.87, 0.90, 0.96)),
    'zb-2p': ((14.5, 14.8, 14.9), (4.32, 4.35, 4.39), (1.81, 1.83, 1.85), (0.99, 1.00, 1.00)),
}
MEMORY = {
    '1f1b': (30, 39, 32, 43),
    'interleaved': (40, 48, 39, 58),
    'zb-1p': (32, 42, 33, 44),
    'zb-2p': (59, 70, 51, 74),
}

# Table 7: ZB-2p with post-validation and with a reduction over all ranks before each step, by
# model, at its fewest microbatches.
POST_VALIDATED = (14.5, 4.32, 1.81, 0.99)
SYNCHRONOUS = (13.11, 4.00, 1.68, 0.91)

# Table 8: equal memory. 1F1B and ZB-1p have microbatches of twice the samples of Table 3.
EQUAL_MEMORY = {
    '1f1b': ((12.0, 12.6, 13.8), (3.56, 3.76, 4.09), (1.53, 1.62, 1.78), (0.81, 0.85, 0.94)),
    'zb-1p': ((13.0, 13.6, 14.4), (3.95, 4.05, 4.24), (1.73, 1.79, 1.89), (0.93, 0.96, 1.02)),
    'zb-2p': ((14.5, 14.8, 14.9), (4.32, 4.35, 4.39), (1.81, 1.83, 1.85), (0.99, 1.00, 1.00)),
}
EQUAL_MEMORY_GB = {
    '1f1b': (57, 66, 50, 72),
    'zb-1p': (61, 71, 51, 74),
    'zb-2p': (59, 70, 51, 74),
}
BATCH_FACTOR = {'1f1b': 2, 'zb-1p': 2, 'zb-2p': 1}

# Table 9: no more microbatches than ranks; by model: (m, 1F1B, its GB, ZB-2p, its GB).
FEW_MICROBATCHES = {
    0: ((2, 3.56, 11, 4.25, 12), (4, 5.74, 18, 6.92, 19), (8, 8.26, 29, 9.90, 34)),
    1: ((2, 1.04, 21, 1.33, 21), (4, 1.69, 28, 2.16, 29), (8, 2.45, 39, 3.07, 44)),
    2: ((4, 0.39, 19, 0.52, 20), (8, 0.65, 24, 0.85, 24), (16, 0.95, 32, 1.25, 33)),
}


class VShape(NamedTuple):
    """One setting of arXiv Tables 6 and 8.

    Pass times are not printed for these. `comm` and `weight` are T_comm and T_W over
    T_F + T_B + T_W, such that 1F1B and ZB-H1 have the rates of Table 8 where T_F = T_B.
    """

    model: str
    num_ranks: int
    num_microbatches: int
    rates: dict[str, float]  # Table 8
    comm: float
    weight: float
    throughput: dict[str, float]  # Table 6; ZB-2p with half the samples, twice the microbatches
    hidden: int
    heads: int


def _v_shape(model: int, p: int, m: int, rates: tuple, solved: tuple, measured: tuple) -> VShape:
    _, _, heads, hidden, _, _ = MODELS[model]
    rates = dict(zip(('1f1b', 'zb-h1', 'zb-h2', 'zb-v'), rates, strict=True))
    measured = dict(zip(('zb-v', 'zb-2p', 'zb-1p', '1f1b'), measured, strict=True))
    return VShape(MODELS[model].name, p, m, rates, *solved, measured, hidden, heads)


V_SHAPE = (
    _v_shape(
        1, 16, 48, (0.2668, 0.1536, 0.0823, 0.0697), (0.0209, 0.251), (4.15, 4.36, 3.87, 3.38)
    ),
    _v_shape(
        1, 16, 64, (0.2206, 0.1198, 0.0630, 0.0533), (0.0210, 0.252), (4.21, 4.37, 4.00, 3.57)
    ),
    _v_shape(
        1, 16, 128, (0.1390, 0.0637, 0.0325, 0.0274), (0.0211, 0.252), (4.35, 4.45, 4.29, 3.91)
    ),
    _v_shape(
        2, 24, 72, (0.2699, 0.1439, 0.0628, 0.0638), (0.0199, 0.277), (1.85, 1.84, 1.72, 1.52)
    ),
    _v_shape(
        2, 24, 96, (0.2229, 0.1121, 0.0480, 0.0483), (0.0199, 0.276), (1.88, 1.84, 1.78, 1.61)
    ),
    _v_shape(
        2, 24, 192, (0.1403, 0.0595, 0.0247, 0.0250), (0.0202, 0.276), (1.93, 1.85, 1.89, 1.76)
    ),
    _v_shape(
        3, 32, 96, (0.2676, 0.1429, 0.0629, 0.0593), (0.0166, 0.275), (1.01, 1.00, 0.94, 0.82)
    ),
    _v_shape(
        3, 32, 128, (0.2204, 0.1111, 0.0478, 0.0451), (0.0168, 0.276), (1.02, 1.00, 0.97, 0.87)
    ),
    _v_shape(
        3, 32, 256, (0.1362, 0.0593, 0.0251, 0.0236), (0.0168, 0.273), (1.06, 1.01, 1.03, 0.95)
    ),
)

# arXiv Table 7: throughput before and after the samples of a microbatch double, by schedule:
# 6.2B from 3 to 6, 14.6B and 28.3B from 1 to 2.
DOUBLED = {
    '1f1b': ((3.48, 3.57), (1.47, 1.61), (0.80, 0.87)),
    'zb-1p': ((3.91, 4.00), (1.65, 1.78), (0.90, 0.97)),
    'zb-v': ((4.13, 4.21), (1.75, 1.88), (0.95, 1.02)),
}
