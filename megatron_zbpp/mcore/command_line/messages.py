"""How this room speaks of flags, and to the user."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def flag(name: str) -> str:
    """Return the flag that sets the argument of that name."""
    return '--' + name.replace('_', '-')


def refuse(message: str) -> None:
    """Tell the user once a host why the job ends, and torchrun, whose own last lines repeat it.

    Once a host, as a file may be missing on one of them only.
    """
    if int(os.environ.get('LOCAL_RANK', 0)) == 0:
        print(message, file=sys.stderr, flush=True)
    file = os.environ.get('TORCHELASTIC_ERROR_FILE')
    if file:
        Path(file).write_text(json.dumps({'message': message, 'timestamp': int(time.time())}))
