"""Runs `python -m megatron_zbpp.launch`."""

from megatron_zbpp.launch import main

if __name__ == '__main__':
    main()
