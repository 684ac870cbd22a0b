"""What the Zero Bubble paper measured and computed (ICLR 2024, arXiv 2401.10241)."""

from benchmarks.paper.predict import activation_bytes
from benchmarks.paper.published import BUBBLE_RATES, MICROBATCHES, MODELS, PASS_TIMES
from megatron_zbpp.ir.costs import Costs

# Tables 3 and 6, and the bubble rates of table 5.
# p, m, T_F, T_B, T_W, T_comm, 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p
TABLE_5 = tuple(
    (
        model.num_ranks,
        MICROBATCHES[i][k],
        *PASS_TIMES[i][k],
        *(rates[i][k] for name, rates in BUBBLE_RATES.items() if name != 'interleaved'),
    )
    for i, model in enumerate(MODELS)
    for k in range(3)
)


def paper_costs(row: int) -> Costs:
    """Times of table 6, bytes of table 1; of a stage in the middle."""
    p, _, forward, backward, weight, comm = TABLE_5[row][:6]
    model = MODELS[row // 3]
    bytes_held = activation_bytes(model.heads, model.hidden, model.batch)
    m_b, m_w = (model.layers * of_one for of_one in bytes_held)
    times = ((time,) * p for time in (forward, backward, weight))
    return Costs.of(*times, comm, activation=(m_b,) * p, retained=(m_w,) * p)
