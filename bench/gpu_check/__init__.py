"""The first half hour on a machine with a GPU: what was only calculated so far, measured, in one table.

    python -m bench.gpu_check ─► copies ─► steps ─► starts ─► attention ─► versions ─► deaths
                                     rows, as JSON lines ◄──┘    each in processes of its own, with a limit of its time

A part whose packages are missing, that needs a GPU where there is none, or that fails, is named with the reason, and
the others go on. Without a GPU, and with `--reduced`, the same code runs on tiny shapes: it shows that the script is
whole, and its figures mean nothing. None of it ever ran on a GPU.
"""
