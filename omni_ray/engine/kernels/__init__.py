"""Triton kernels of a captured frame. Imported only where a GPU computes; ``TRITON_INTERPRET=1`` runs them on a CPU.

Each module holds the kernels and the functions that launch them. Launchers allocate nothing and never wait for the GPU,
so that a CUDA graph can record them. A row's numbers depend on no other row of the batch.
"""
