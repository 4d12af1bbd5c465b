"""From a tensor graph to Triton kernels, on paper: which values are kept, in which loops they are made, and the text of it.

No file here imports triton: the text is made anywhere, and compiled where `memkit.compiler.launch` finds triton.
"""
