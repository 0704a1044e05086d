"""Operations that decide the speed, one folder per op.

Each folder holds `reference.py`, plain torch that says what the op means, and beside it forms of
the same signature for a processor: `numba_cpu.py`, `triton_gpu.py`. A form is imported when it is
chosen, and compiled then; the object code is kept on disk.
"""
