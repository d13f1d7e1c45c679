"""What the sides say to each other: messages (`wire`), a stream in Redis (`transport`), versioned weights (`weights`).

Imports neither side, and nothing of what operators run.
"""
