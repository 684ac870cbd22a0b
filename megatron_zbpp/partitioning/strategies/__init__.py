"""Partitions of others' planners, each by its name: the choice of its recurrence, and its time.

pipedream    stages with replicas that even out stages and links (asynchronous)
dapple       the same for synchronous schedules, ranked by a closed form
pipe-torch   straight, over orders of unequal devices and links (asynchronous)
spp          straight, devices in the order of a recursive minimum cut
2bw          equal stages: width, depth and microbatch at once (asynchronous)
"""
