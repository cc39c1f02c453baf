"""minserve's Triton kernels, a package of its own: torch and Triton only, and nothing of minserve.

Each operation is there twice: in `reference.py` as a short torch function, which says what is meant and is
the path of machines without a GPU, and as a kernel with a launcher of the same name and arguments in a file
of its own. Importing the package, or `kv` and `reference`, needs no Triton.
"""
