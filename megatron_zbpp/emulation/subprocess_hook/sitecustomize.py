"""On the path of processes that a run on the CPU starts: Megatron is on the CPU there, too.

Saving a checkpoint starts one. torch is imported only where megatron.core is.
"""

import os
import sys


class _Arm:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 'megatron.core':
            sys.meta_path.remove(_Arm)
            from megatron_zbpp.emulation import cpu, te

            cpu.install()
            if folder := os.environ.get(te.FOLDER):
                te.install(folder)
        return None


sys.meta_path.insert(0, _Arm)
