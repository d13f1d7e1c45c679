"""`streamrl top`: a live view of a run in a terminal.

    a thread looks at Redis ─► Poller.seen ─► draw(view, screen) ─► terminal (only lines that changed)
                                  keys ─► Screen.press ─┘

The thread that reads keys also draws, so keys respond at once however slow Redis is, except those that ask Redis for
groups. rich maps styles to what the terminal supports (NO_COLOR, no colour, 256 or more); the layout is our own, line
by line, since it must fit 80 x 24 and stay cheap with a thousand workers.
"""
