"""Stands where jobs look for NVIDIA's pretrain_gpt.py: runs it, and keeps each loss exactly.

The environment says TRAINING_SCRIPT, which is run; LOSSES, a file that gets a line an iteration;
and PAUSE, seconds after each.
"""

import functools
import os
import runpy
import sys
import time
from pathlib import Path

from megatron.training import training


def keeping(original):
    """Megatron's `training_log`, and a line in the file: only the last rank has losses."""

    @functools.wraps(original)
    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **named):
        if loss_dict:
            with open(os.environ['LOSSES'], 'a') as file:
                file.write(f'{iteration} {loss_dict["lm loss"].item().hex()}\n')
            time.sleep(float(os.environ['PAUSE']))
        return original(loss_dict, total_loss_dict, learning_rate, iteration, *rest, **named)

    return training_log


if __name__ == '__main__':
    training.training_log = keeping(training.training_log)
    script = Path(os.environ['TRAINING_SCRIPT'])
    sys.path.insert(0, str(script.parent))  # as Python does for what it runs
    runpy.run_path(str(script), run_name='__main__')
