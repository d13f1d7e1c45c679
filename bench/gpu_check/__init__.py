"""The first half hour on a machine with a GPU: measures what was only calculated so far, and prints one table.

    python -m bench.gpu_check ─► copies ─► steps ─► starts ─► head ─► attention ─► publish ─► reload ─► routes ─► deaths
                                     rows, as JSON lines ◄──┘    each part in its own processes, with its own time limit

A part that lacks packages, needs a missing GPU, or fails is reported with the reason, and the others continue. Without
a GPU, and with `--reduced`, the same code runs on tiny shapes: this shows that the script works, but its figures mean
nothing. Of `reload`, `routes` and `deaths`: no GPU has run this.
"""
