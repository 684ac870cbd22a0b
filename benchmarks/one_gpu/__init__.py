"""What one GPU can prove: streams, NCCL among ranks that share it, spinning receives.

Run by `scripts/gpu_check.sh`. Without a GPU each program rehearses: the same code on the CPU and
gloo, which proves that it runs, and nothing of a GPU; it says so.
"""

REHEARSAL = 'rehearsal without a GPU: this proves nothing of one'
