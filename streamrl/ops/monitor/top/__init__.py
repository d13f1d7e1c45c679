"""`streamrl top`: a run, live, in a terminal.

    a thread looks at Redis ─► Looker.view ─► draw(view, screen) ─► terminal (only lines that changed)
                                  keys ─► Screen.press ─┘

The screen is drawn by the thread that reads keys, so keys answer at once however slow Redis is, but for those that ask
it for groups. rich turns styles into what the terminal understands (NO_COLOR, no colour at all, 256 or more); the
layout is ours, line by line, since it must hold at 80 x 24 and cost little at a thousand workers.
"""
