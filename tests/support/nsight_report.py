"""A report of Nsight Systems, of the schema that `nsys export --type sqlite` writes."""

import sqlite3
from pathlib import Path


def report(path: Path, device: bool = True, ranks: int = 2) -> Path:
    """An sqlite of the schema of Nsight Systems: each rank runs F, B and W for two microbatches."""
    base = sqlite3.connect(path)
    base.executescript(Path(__file__).with_suffix('.sql').read_text())
    names = {1: 'sm90_gemm', 2: 'ncclDevKernel_SendRecv'}
    for rank in range(ranks):
        thread = (100 + rank << 24) | 7
        for at, kind in enumerate('FBWFBW'):
            start, key = 1000 * at, 10 * at
            names[100 * rank + at + 10] = f'PP:{rank}{kind}{at // 3}'
            base.execute(
                'INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, NULL, ?, ?, 0)',
                (start, start + 100, 100 * rank + at + 10, thread),
            )
            # two kernels, 500 to 800 later; NCCL's does not count, nor one from between passes
            spans = [(500, 600, 1), (650, 800 + rank, 1), (800, 990, 2)]
            for more, (begin, end, name) in enumerate(spans):
                base.execute(
                    'INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 1)',
                    (start + more, start + more + 1, thread + 1, key + more),
                )
                base.execute(
                    'INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)',
                    (start + begin, start + end, key + more, 100 + rank << 24, name),
                )
    base.executemany('INSERT INTO StringIds VALUES (?, ?)', names.items())
    if not device:
        base.execute('DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL')
    base.commit()
    base.close()
    return path
