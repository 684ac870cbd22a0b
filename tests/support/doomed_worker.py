"""A process of the GPT benchmark whose rank 1 is killed, while rank 0 waits for it."""

import os
import signal
import time

if __name__ == '__main__':
    if os.environ['RANK'] == '1':
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
