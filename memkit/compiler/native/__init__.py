"""The compiler's C++ for CPUs: what is kept in memory (`choice`), single entries (`entries`), products, steps and loops (`text`).

`products.cpp`, `functions.h`, `solve.h`, `tables.h` and `team.h` are the C++ that emitted code calls.
"""
